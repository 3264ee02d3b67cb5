"""From the settings to the configurations of the parts: beside the daemon, which alone hands them out."""

import time

from kvctl.core.engine_view import ViewConfig
from kvctl.core.supply import GateConfig
from kvctl.engines.base import Engine
from kvctl.proxy.seams import ProxyConfig
from kvctl.settings.model import Settings


def gate_config(settings: Settings, engine: Engine) -> GateConfig:
    """What the gate is told at the start."""
    late = 2 * settings.scrape_interval + settings.scrape_timeout
    return GateConfig(
        margin_ratio=settings.margin,
        policy=settings.policy,
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
        jitter_seed=time.time(),
        view=ViewConfig(
            late_after_s=min(late, settings.stale_after),
            stale_after_s=settings.stale_after,
            stall_timeout_s=settings.stall_timeout,
            cards_named=settings.gpus != ("all",),
        ),
    )


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
        base_path=settings.base_path,
        opened=settings.routes_pass,
        admin_opened=settings.routes_admin_pass,
    )
