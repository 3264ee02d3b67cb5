"""A running vLLM as the model of a plan, for ``kvctl plan --like``."""

import urllib.error
import urllib.request
from urllib.parse import urlsplit

from kvctl.control.reported import Reported, reported
from kvctl.plan import PlanError

_TIMEOUT_S = 5.0
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
    """The body of a 200, None for any other status. Raises PlanError where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
            return str(answer.read(_MAX_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"--like: no answer from {url}: {error}") from None
