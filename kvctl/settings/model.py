"""Every setting: its key, default, unit, bounds and meaning, once.

The key is at once the TOML key, the environment variable (KVCTL_ and the key in capitals, dots as
underscores) and the flag (two dashes, underscores as dashes). docs/configuration.md is generated from here.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvctl.core.outcomes import LargeRequests, MetricsView, Policy
from kvctl.settings import types as t
from kvctl.settings.checks import disagreements
from kvctl.settings.engines import first_url
from kvctl.settings.live import LIVE
from kvctl.settings.units import Address
from kvctl.settings.usual import ADMIN_SOCKET, STATE_DIR

ENV_PREFIX = "KVCTL_"
MS, MIN, HOUR, DAY = 0.001, 60, 3600, 86400
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
AT_ODDS = "at_odds"  # the type of the errors between settings
MANY = 10**9  # KV tokens: beyond any pool

_SIDES = ("ge", "le")  # the attributes of pydantic's bounds


class Layer(StrEnum):
    """Where a value may come from; a later one wins over an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENV = "env"
    SECRET = "secret"  # noqa: S105 - a word, not one
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the value in force came from; ``where`` names file and line, variable or flag."""

    layer: Layer
    where: str = ""


class Settings(BaseSettings):
    """All settings, valid and in base units: seconds, bytes, KV tokens, shares of one.

    Made of keyword arguments alone; ``load`` adds what files and environment say.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        enable_decoding=False,
        use_attribute_docstrings=True,
    )

    engine_url: t.BaseUrl
    """The engine: base URL of its API, with or without /v1. Left out where there are [[engines]]."""
    engines: t.Engines = ()
    """Several engines, as [[engines]] tables with name, url, models, aliases, and settings of their own."""
    rank_pinning: t.RankPinning = "auto"
    """Gate a data-parallel engine rank by rank, where it lets a request be pinned to one; off: as a whole."""
    engine_api_key: t.Secret = None
    """The engine's --api-key, for kvctl's own questions to it; callers send their own."""
    engine: t.Engine = "auto"
    """The kind of engine; auto: detected from its answers, and again when another kind answers."""
    engine_ca: t.MaybePath = None
    """Authorities (PEM) trusted for the engine's certificate; none: those of the system."""
    engine_client_certificate: t.MaybePath = None
    """Certificate chain (PEM) that kvctl presents to an engine that asks for one."""
    engine_client_key: t.MaybePath = None
    """Private key of that certificate, without a pass phrase; none: in the same file."""
    engine_server_name: t.ServerName = ""
    """Name that the engine's certificate must bear; none: the one in its URL."""
    engine_verify: t.Switch = True
    """Whether the certificate of an https engine is verified; false: whoever answers there is trusted."""
    engine_drain_on_abort: t.Switch = False
    """Read an answer to its end even if its caller left, for engines that a closed connection harms."""
    listen: t.Address = Address("127.0.0.1", 8080)
    """Where callers connect."""
    tls_certificate: t.MaybePath = None
    """Certificate chain (PEM) of the data port, read again on a reload; none: callers speak plain HTTP."""
    tls_key: t.MaybePath = None
    """Private key of that certificate, without a pass phrase; none: in the same file."""
    tls_client_ca: t.MaybePath = None
    """Authorities (PEM) trusted for callers' certificates; none: callers need no certificate."""
    base_path: t.BasePath = ""
    """Prefix of every route of the data port."""
    admin_listen: t.Address = Address("127.0.0.1", 9109)
    """Where /metrics, /healthz, /readyz and the status page are served. Nothing changes anything there."""
    admin_socket: t.SocketPath = ADMIN_SOCKET
    """Unix socket of the admin API, mode 0660. A user who may not write there: $XDG_RUNTIME_DIR/kvctl."""
    agent_listen: t.MaybeAddress = None
    """Where HAProxy's agent-check is answered with this box's headroom; none: nowhere."""
    load_report: t.Switch = False
    """Envoy's load report as a header on every answer."""
    metrics_view: t.MetricsView = MetricsView.ENGINE
    """/metrics on the data port: the engine's page; gate: with usage and waiting as the gate sees them."""
    state_dir: t.WholePath = STATE_DIR
    """Where overrides and audit outlive a restart. A user who may not write there: ~/.local/state/kvctl."""

    margin: t.Ratio = Field(default=0.05, ge=0, le=0.95)
    """Share of the capacity that is kept free."""
    margin_min: t.Ratio = Field(default=0.0, ge=0, le=0.95)
    """Least margin that an override may set."""
    margin_max: t.Ratio = Field(default=0.5, ge=0, le=0.95)
    """Largest margin that an override may set."""
    policy: t.Policy = Policy.FORECAST
    """What is weighed against the budget: the forecast, the worst cases (static), or nothing (none)."""
    enforce: t.Enforced = Field(default=1.0, ge=0, le=1)
    """Share of the requests on which decisions are enforced; false (0): all are let in, and only counted."""
    max_context: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """Refuse requests whose prompt and allowed output exceed this."""
    capacity_tokens: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """KV tokens of one engine rank, where the engine does not say."""
    capacity_force: t.Switch = False
    """Believe capacity_tokens even where the engine says otherwise."""
    fallback_budget_tokens: t.Count = Field(default=16384, ge=1, le=MANY)
    """Budget while the capacity is unknown or the telemetry is stale."""
    plan_model: t.MaybePath = None
    """The model's folder (config.json), to plan the pool; none: the folder that tokenizer names."""
    plan_flags: t.PlanFlags = ""
    """Flags of kvctl plan that the engine does not tell, such as --tp 2 --gpu H100."""
    max_logprobs: t.MaybeCount = Field(default=20, ge=0, le=MANY)
    """Log-probabilities per token that a request may ask for; they take memory that no KV budget covers."""
    overload_status: t.OverloadStatus = 429
    """Status of a refusal for lack of budget."""
    ttft_target: t.MaybeDuration = Field(default=2.0, ge=10 * MS, le=HOUR)
    """Time to the first token that callers are promised; none: the prefill backlog is not guarded."""
    itl_target: t.MaybeDuration = Field(default=0.1, ge=1 * MS, le=MIN)
    """Time between tokens that callers are promised; none: the decode concurrency is not guarded."""
    max_num_seqs: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """The engine's --max-num-seqs; none: inferred from what it runs while others wait."""
    prefix_sharing: t.PrefixSharing = "auto"
    """Count once what requests in flight have in common, where the engine caches prefixes; off: never."""
    retry_after_max: t.Duration = Field(default=60.0, ge=1, le=HOUR)
    """Longest Retry-After that is sent."""

    queue_max_wait: t.Duration = Field(default=0.0, ge=0, le=HOUR)
    """Longest that a request waits for room; it waits only if the forecast starts it by then. 0: none."""
    queue_max_requests: t.Count = Field(default=256, ge=1, le=100_000)
    """Most requests that wait for one engine at once."""
    queue_max_bytes: t.Size = Field(default=64 * MIB, ge=KIB, le=TIB)
    """Most bytes of bodies held for the requests that wait for one engine."""
    large_requests: t.LargeRequests = LargeRequests.REFUSE
    """Requests that only a nearly drained engine has room for: refuse them, or reserve (drain for them)."""
    large_requests_share: t.Ratio = Field(default=0.2, ge=0.01, le=0.9)
    """Largest share of the time that the gate may drain for large requests."""
    large_requests_max_wait: t.Duration = Field(default=60.0, ge=1, le=HOUR)
    """Longest time that a large request waits; its TTFT target does not count."""
    tenants: t.Tenants = ()
    """Tenants, as [[tenants]] tables with name, keys (SHA-256), weight, priority and limits."""
    tenant_header: t.TenantHeader = ""
    """Header that names the tenant, set by a gateway in front; none: the API key decides."""
    api_keys_file: t.MaybePath = None
    """File of the API keys that are let in, one SHA-256 and tenant per line; none: the engine checks keys."""

    tick_interval: t.Duration = Field(default=0.2, ge=10 * MS, le=10)
    """How often budget and forecast are recomputed."""
    scrape_interval: t.Duration = Field(default=0.2, ge=10 * MS, le=MIN)
    """How often the engine's metrics are read."""
    scrape_timeout: t.Duration = Field(default=1.0, ge=10 * MS, le=MIN)
    """Deadline of one reading."""
    scrape_max_bytes: t.Size = Field(default=16 * MIB, ge=4 * KIB, le=GIB)
    """Largest metrics page that is read."""
    stale_after: t.Duration = Field(default=10.0, ge=20 * MS, le=HOUR)
    """Age at which the engine's telemetry is no longer trusted."""
    stall_timeout: t.Duration = Field(default=30.0, ge=50 * MS, le=HOUR)
    """Time without a token, with requests in flight, after which the engine is wedged."""

    max_body_bytes: t.Size = Field(default=64 * MIB, ge=KIB, le=4 * GIB)
    """Largest body of one request."""
    max_body_bytes_total: t.Size = Field(default=512 * MIB, ge=KIB, le=TIB)
    """Bodies held at once, over all requests."""
    header_timeout: t.Duration = Field(default=10.0, ge=10 * MS, le=HOUR)
    """Time that a caller has to send the headers."""
    body_timeout: t.Duration = Field(default=60.0, ge=10 * MS, le=HOUR)
    """Longest silence in a body; one that averages below 16 KiB/s counts as silent."""
    connect_timeout: t.Duration = Field(default=5.0, ge=10 * MS, le=5 * MIN)
    """Deadline of connecting to the engine."""
    client_write_timeout: t.Duration = Field(default=60.0, ge=10 * MS, le=HOUR)
    """Time that a caller may stop reading before the answer is cut."""
    first_event_peek: t.Duration = Field(default=0.0, ge=0, le=MIN)
    """Longest hold of a stream's status for its first event, to tell an error inside a 200; 0: no hold."""
    stream_heartbeat: t.Duration = Field(default=0.0, ge=0, le=HOUR)
    """Silence of an event stream after which its caller gets a comment, between two events; 0: never."""
    background_responses: t.Count = Field(default=1000, ge=0, le=100_000)
    """Most responses that are generated in the background at once; 0: background=true is refused."""
    upstream_read_timeout: t.MaybeDuration = Field(default=None, ge=10 * MS, le=DAY)
    """Longest silence of the engine within one answer."""
    drain_timeout: t.Duration = Field(default=600.0, ge=0, le=DAY)
    """Time that running answers have to end when kvctl stops."""

    gpus: t.Gpus = ("all",)
    """The engine's cards; name them where other engines run. auto: those of its processes, if visible."""
    gpu_interval: t.Duration = Field(default=1.0, ge=10 * MS, le=MIN)
    """How often the cards are read."""
    gpu_timeout: t.Duration = Field(default=2.0, ge=10 * MS, le=MIN)
    """Deadline of one reading of the cards."""
    nvml_isolation: t.NvmlIsolation = "process"
    """Where the driver's library runs; in a thread, a crash inside it ends kvctl."""
    gpu_guard: t.Size = Field(default=GIB, ge=0, le=TIB)
    """Free memory of a card below which pressure is put on the budget."""

    tokenizer: t.Text = "engine"
    """Who counts tokens: engine, a path of local tokenizer files, or bound (bytes)."""
    tokenize_inline_bytes: t.Size = Field(default=2048, ge=0, le=MIB)
    """Prompts up to this size are counted on the event loop."""
    tokenize_workers: t.Count = Field(default=2, ge=1, le=64)
    """Threads that count longer prompts."""
    tokenize_isolation: t.Isolation = "thread"
    """Where a local tokenizer runs: in kvctl's process, or in one of its own that may crash alone."""
    tokenize_timeout: t.Duration = Field(default=5.0, ge=10 * MS, le=5 * MIN)
    """Deadline of counting, after which bytes bound the count."""
    image_tokens: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """Most prompt tokens of one image; none: what the model's folder tells, else 16384."""
    video_tokens: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """Most prompt tokens of one video; none: 32768."""
    audio_tokens: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """Prompt tokens of one sound in a chat, or as many as its bytes allow if that is more; none: 16384."""

    override_ttl_max: t.Duration = Field(default=24.0 * HOUR, ge=1, le=30 * DAY)
    """Longest life of an override."""
    decision_log_size: t.Count = Field(default=10_000, ge=0, le=1_000_000)
    """Decisions that are remembered, for kvctl explain and for what a dry run looks back at."""
    decision_log_file: t.MaybePath = None
    """File of every decision, one JSON object a line, without any prompt text; none: none is written."""
    decision_log_bytes: t.Size = Field(default=64 * MIB, ge=64 * KIB, le=TIB)
    """Size at which that file is rotated; four old ones are kept."""
    log_level: t.LogLevel = "info"
    """Lowest severity that is logged."""
    log_format: t.LogFormat = "text"
    """Form of the log lines."""
    access_log: t.Switch = False
    """One log line for each request."""

    routes_pass: t.Routes = Field(default=(), alias="routes.pass")
    """POST routes, unknown to kvctl, that are passed to the engine uncounted."""
    routes_admin_pass: t.Routes = Field(default=(), alias="routes.admin_pass")
    """Engine administration routes that are passed all the same."""

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What ``load`` found and hands in; nothing from the process's environment behind its back."""
        return (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _first_engine(cls, given: dict[str, Any]) -> dict[str, Any]:
        """With [[engines]], ``engine_url`` is the first engine's."""
        if "engine_url" in given or not (url := first_url(given.get("engines", ()))):
            return given
        return {**given, "engine_url": url}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shown = self.model_dump(mode="json")
        errors: list[InitErrorDetails] = [
            {
                "type": PydanticCustomError(AT_ODDS, "{text}", {"text": text.format_map(shown)}),
                "loc": (key,),
                "input": text,
            }
            for key, text in disagreements(self)
        ]
        if errors:
            raise ValidationError.from_exception_data("Settings", errors)
        return self

    def origin(self, key: str) -> Origin:
        """Where the value of ``key`` came from."""
        return self._origins.get(key, Origin(Layer.DEFAULT))

    def adopt(self, fresh: "Settings", keys: Iterable[str]) -> "Settings":
        """These settings with the values of ``keys``, and where they came from, of ``fresh``."""
        taken = list(keys)
        merged = self.model_copy(
            update={SPECS[key].attribute: getattr(fresh, SPECS[key].attribute) for key in taken}
        )
        merged._origins = {**self._origins, **{key: fresh.origin(key) for key in taken}}  # noqa: SLF001
        return merged

    def shown(self, key: str) -> str:
        """The value of ``key`` as an operator would write it."""
        return SPECS[key].show(getattr(self, SPECS[key].attribute))


@dataclass(frozen=True, slots=True)
class Spec:
    """What people see of one field of the model."""

    attribute: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """Its TOML key."""
        return self.field.alias or self.attribute

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.attribute.upper()

    @property
    def flag(self) -> str:
        """Its flag of ``kvctl serve``."""
        return "--" + self.attribute.replace("_", "-")

    @property
    def live(self) -> bool:
        """Whether a reload puts it in force; else a restart does."""
        return self.key in LIVE

    @property
    def secret(self) -> bool:
        """Whether its value is never shown; it has no flag, which every user of the machine could read."""
        return self.field.annotation == SecretStr | None

    @property
    def form(self) -> t.Form:
        """How its values are written."""
        return next(each for each in self.field.metadata if isinstance(each, t.Form))

    @property
    def bounds(self) -> tuple[Any, ...]:
        """The least and the most allowed, in base units; empty: no bounds."""
        return tuple(
            getattr(each, side) for side in _SIDES for each in self.field.metadata if hasattr(each, side)
        )

    @property
    def _adapter(self) -> TypeAdapter[Any]:
        kept = [each for each in self.field.metadata if not any(hasattr(each, side) for side in _SIDES)]
        annotated: Any = Annotated[self.field.annotation, *kept]
        return TypeAdapter(annotated)

    def read(self, raw: object) -> Any:
        """The value of ``raw``, without regard to its bounds. Raises ValueError with a text for people."""
        try:
            return self._adapter.validate_python(raw)
        except ValidationError as error:
            raise ValueError(self.complaint(error.errors()[0])) from None

    def judge(self, raw: object) -> Any:
        """The value of ``raw``, within its bounds. Raises ValueError with a text for people."""
        annotated: Any = Annotated[self.field.annotation, *self.field.metadata]
        try:
            return TypeAdapter(annotated).validate_python(raw)
        except ValidationError as error:
            raise ValueError(self.complaint(error.errors()[0])) from None

    def show(self, value: object) -> str:
        """A value as an operator would write it."""
        return str(self._adapter.dump_python(value, mode="json", warnings=False))

    def complaint(self, error: ErrorDetails) -> str:
        """What is wrong with a value, and what to write instead."""
        context = error.get("ctx", {})
        match error["type"]:
            case "value_error":
                message = str(context["error"])
            case "greater_than_equal":
                message = f"is below the least allowed, {self.show(context['ge'])}"
            case "less_than_equal":
                message = f"is above the most allowed, {self.show(context['le'])}"
            case _:
                message = "does not fit"
        return message if ": " in message else f"{message}; write {self.form.expects}"


SPECS: Mapping[str, Spec] = MappingProxyType(
    {spec.key: spec for spec in itertools.starmap(Spec, Settings.model_fields.items())}
)
