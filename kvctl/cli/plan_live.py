"""What ``kvctl plan`` can ask instead of being told: a running vLLM (--like), this machine (--measure)."""

import asyncio
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from kvctl.cli.plan_inputs import UnansweredError
from kvctl.control.planning import smallest_card
from kvctl.control.reported import Reported, reported
from kvctl.gpu.base import GpuReading
from kvctl.gpu.nvml import make_source
from kvctl.plan import Card, PlanError

_TIMEOUT_S = 5.0
_SILENT = "is the engine running, and is that its address?"
_MAX_BYTES = 16 << 20


def read_live(url: str) -> Reported:
    """Ask the engine at ``url`` (http or https, no path needed). Raises PlanError where it is no vLLM."""
    base = url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise PlanError(f"--like {url}: an http or https address is wanted")
    models, metrics, version = (_get(base + path) for path in ("/v1/models", "/metrics", "/version"))
    if metrics is None:
        raise PlanError(f"--like {url}: no /metrics there")
    try:
        found = reported(metrics, models, version)
    except PlanError as error:
        raise PlanError(f"--like {url}: {error}") from None
    if not found.labels:
        raise PlanError(f"--like {url}: /metrics has no vllm:cache_config_info; is it a vLLM?")
    return found


def _get(url: str) -> str | None:
    """The body of a 200, None for any other status. Raises UnansweredError where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
            return str(answer.read(_MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)  # urllib wraps what the system said
        why = getattr(why, "strerror", None) or why
        raise UnansweredError(f"--like: no answer from {url}: {why}; {_SILENT}") from None


def measured_card() -> Card:
    """The smallest card's total memory as the driver says it. Raises UnansweredError where there is none."""
    reading = asyncio.run(_read())
    card = smallest_card(reading.samples)
    if card is None:
        why = reading.detail or (str(reading.fault) if reading.fault else "no card answered")
        raise UnansweredError(
            f"--measure: no GPU can be read on this machine ({why}); give --gpu NAME or --gpu GiB"
        )
    return card


async def _read() -> GpuReading:
    source = make_source(["all"], timeout_s=_TIMEOUT_S)
    if source is None:
        return GpuReading()
    try:
        return await source.read()
    finally:
        await source.close()
