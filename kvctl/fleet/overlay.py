"""The engine's metrics page with the gate's view laid over it, for routers that scrape engines.

A router that weighs pods by ``vllm:kv_cache_usage_perc`` and ``vllm:num_requests_waiting`` sees the forecast
instead of the gauge, and kvctl's own queue beside the engine's: it stops sending where the gate would refuse,
before the gauge rises. Every other line passes as it is.
"""

import re
from collections.abc import Mapping

from kvctl.fleet.standing import Standing

USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
WAITING_NAMES = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")

_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? +(\S+)( .*)?$", re.MULTILINE)


def overlay(page: bytes, standing: Standing) -> bytes:
    """``page`` with usage and waiting as the gate sees them."""
    usage = b"%.6f" % min(max(standing.forecast_ratio, 0.0), 1.0)
    values: Mapping[bytes, bytes | None] = {
        **{name.encode(): usage for name in USAGE_NAMES},
        **{name.encode(): None for name in WAITING_NAMES},
    }

    def written(found: re.Match[bytes]) -> bytes:
        name, labels, value, rest = found[1], found[2] or b"", found[3], found[4] or b""
        if name not in values:
            return found[0]
        fresh = values[name]
        return b"%b%b %b%b" % (name, labels, _waiting(value, standing) if fresh is None else fresh, rest)

    return _SAMPLE.sub(written, page)


def _waiting(value: bytes, standing: Standing) -> bytes:
    """The engine's own waiting requests and those in kvctl's queue; what is no number stays as it is."""
    try:
        return b"%.1f" % (float(value) + standing.waiting)
    except ValueError:
        return value
