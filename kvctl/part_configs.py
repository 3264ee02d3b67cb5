"""Makes the configurations of the parts from the settings; only the daemon hands them out."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvctl.control.certificates import Certificates, Identity, IdentityFiles, Trust, TrustFiles
from kvctl.control.decision_file import DecisionFile
from kvctl.core.engine_view import ViewConfig
from kvctl.core.outcomes import Policy
from kvctl.core.overrides import Knob, Value
from kvctl.core.queue import QueueConfig
from kvctl.core.supply import GateConfig
from kvctl.core.tenants import TenantRule
from kvctl.engines.base import Engine
from kvctl.engines.detect import routes_of
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.tenancy import KeysError, Tenancy, read_keys
from kvctl.settings.model import SPECS, Settings
from kvctl.settings.tenants import TenantEntry


def engine_settings(settings: Settings) -> Mapping[str, Settings]:
    """By engine, the settings in force for it: its own, else those of the top level."""
    if not settings.engines:
        return {settings.engine_url: settings}
    return {
        each.name: settings.model_copy(update={"engine_url": each.url, **each.own})
        for each in settings.engines
    }


def gate_config(settings: Settings, engine: Engine) -> GateConfig:
    """What the gate is told at the start."""
    late = 2 * settings.scrape_interval + settings.scrape_timeout
    return GateConfig(
        margin_ratio=settings.margin,
        policy=settings.policy,
        enforce_ratio=settings.enforce,
        fallback_budget_tokens=settings.fallback_budget_tokens,
        capacity_tokens=settings.capacity_tokens,
        capacity_force=settings.capacity_force,
        max_context=settings.max_context,
        clamps_output=engine.clamps_output,
        gpu_guard_bytes=settings.gpu_guard,
        poll_interval_s=settings.scrape_interval,
        retry_after_max_s=settings.retry_after_max,
        ttft_target_s=settings.ttft_target,
        itl_target_s=settings.itl_target,
        max_num_seqs=settings.max_num_seqs,
        prefix_sharing=settings.prefix_sharing == "auto",
        queue=QueueConfig(
            max_wait_s=settings.queue_max_wait,
            max_requests=settings.queue_max_requests,
            max_bytes=settings.queue_max_bytes,
            large=settings.large_requests,
            large_share=settings.large_requests_share,
            large_max_wait_s=settings.large_requests_max_wait,
        ),
        tenants=tuple(map(tenant_rule, settings.tenants)),
        jitter_seed=time.time(),
        view=ViewConfig(
            late_after_s=min(late, settings.stale_after),
            stale_after_s=settings.stale_after,
            stall_timeout_s=settings.stall_timeout,
            cards_named=settings.gpus not in {("all",), ("auto",)},
        ),
    )


def tenant_rule(entry: TenantEntry) -> TenantRule:
    """What the gate is told of a tenant."""
    return TenantRule(
        name=entry.name,
        weight=entry.weight,
        may_prioritise=entry.priority,
        tokens_in_flight=entry.tokens_in_flight,
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
    )


def tenancy(settings: Settings) -> Tenancy:
    """What names the tenants on the data port. Reads the file of keys. Raises KeysError."""
    keys = {key: each.name for each in settings.tenants for key in each.keys}
    path = settings.api_keys_file
    if path is not None:
        try:
            keys |= read_keys(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise KeysError(f"api_keys_file {path}: {error.strerror}") from None
        except ValueError as error:
            raise KeysError(f"api_keys_file {path}: {error}") from None
    known = [each.name for each in settings.tenants]
    return Tenancy(keys, known=known, header=settings.tenant_header, check=path is not None)


def authorization(settings: Settings) -> str | None:
    """The Authorization header of kvctl's own questions to the engine; None: none is set."""
    key = settings.engine_api_key
    return None if key is None else f"Bearer {key.get_secret_value()}"


def trust_of(settings: Settings) -> Trust | None:
    """TLS towards the engine; None: it is reached without. Reads files. Raises CertificateError."""
    if not settings.engine_url.startswith("https:"):
        return None
    files = TrustFiles(
        ca=settings.engine_ca,
        certificate=settings.engine_client_certificate,
        key=settings.engine_client_key,
        server_name=settings.engine_server_name or None,
        verify=settings.engine_verify,
    )
    return Trust(files)


def identity_of(settings: Settings) -> Identity | None:
    """TLS towards callers; None: they speak plain HTTP. Reads files. Raises CertificateError."""
    if settings.tls_certificate is None:
        return None
    return Identity(
        IdentityFiles(
            certificate=settings.tls_certificate, key=settings.tls_key, client_ca=settings.tls_client_ca
        )
    )


def certificates_of(settings: Settings) -> Certificates:
    """All of the daemon's TLS. Reads files. Raises CertificateError."""
    trusts = {name: trust_of(one) for name, one in engine_settings(settings).items()}
    known = {name: trust for name, trust in trusts.items() if trust is not None}
    return Certificates(identity_of(settings), known)


def knob_defaults(settings: Settings) -> dict[Knob, Value | None]:
    """The value of every knob while nobody overrides it."""
    return {
        Knob.MARGIN: settings.margin,
        Knob.POLICY: settings.policy,
        Knob.ENFORCE: settings.enforce,
        Knob.CAPACITY_TOKENS: settings.capacity_tokens,
        Knob.MAX_CONTEXT: settings.max_context,
        Knob.QUEUE_MAX_WAIT: settings.queue_max_wait,
    }


def with_overrides(settings: Settings, overridden: Mapping[Knob, Value]) -> Settings:
    """The settings with the overrides applied. A capacity that on-call names is forced."""
    update: dict[str, Any] = {knob.value: value for knob, value in overridden.items() if knob in SPECS}
    if Knob.CAPACITY_TOKENS in overridden:
        update["capacity_force"] = True
    if Knob.POLICY in overridden:
        update["policy"] = Policy(str(overridden[Knob.POLICY]))
    return settings.model_copy(update=update)


def proxy_config(settings: Settings) -> ProxyConfig:
    """What the data plane is told at the start."""
    return ProxyConfig(
        overload_status=settings.overload_status,
        retry_after_max=settings.retry_after_max,
        max_body_bytes=settings.max_body_bytes,
        max_body_bytes_total=settings.max_body_bytes_total,
        header_timeout=settings.header_timeout,
        body_timeout=settings.body_timeout,
        client_write_timeout=settings.client_write_timeout,
        first_event_peek=settings.first_event_peek,
        stream_heartbeat=settings.stream_heartbeat,
        background_responses=settings.background_responses,
        base_path=settings.base_path,
        opened=settings.routes_pass,
        admin_opened=settings.routes_admin_pass,
        tenancy=tenancy(settings),
    )


def decision_file(settings: Settings, clock: Callable[[], float]) -> DecisionFile | None:
    """Where decisions are written, if anywhere; ``clock`` gives the monotonic seconds of their records."""
    if settings.decision_log_file is None:
        return None
    return DecisionFile(
        settings.decision_log_file,
        max_bytes=settings.decision_log_bytes,
        wall_offset=lambda: time.time() - clock(),
    )


def route_names(settings: Settings) -> list[str]:
    """The names of all routes of the engines, each once."""
    each = engine_settings(settings).values()
    return list({route.name: None for one in each for route in routes_of(one.engine)})
