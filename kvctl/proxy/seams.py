"""What the proxy needs of the rest: its settings, where it reports, and the engine behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.outcomes import EndReason, ProxyFault, RejectReason
from kvctl.engines.base import Engine
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.tokens.base import CountMethod

Readiness = Callable[[], tuple[bool, str]]  # (ready, the reason in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request, after its end: for metrics and the access log. ``status`` 0: the client never got one."""

    request_id: str
    method: str
    route: str
    status: int
    seconds: float
    first_byte_s: float | None = None  # from arrival to the engine's first body byte
    stream: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reject: RejectReason | None = None
    end: EndReason | None = None


class ProxyMetrics(Protocol):
    """Told of everything that is to be counted. Called on the loop: must be quick."""

    def served(self, record: Served) -> None:
        """A request is over."""

    def counted(self, method: CountMethod, seconds: float) -> None:
        """A prompt was counted."""

    def decided(self, seconds: float) -> None:
        """The gate took that time to decide on a request."""

    def fault(self, word: ProxyFault) -> None:
        """Something went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Times in seconds, sizes in bytes."""

    overload_status: int = 429
    retry_after_max: float = 60.0
    max_body_bytes: int = 64 * 1024 * 1024
    max_body_bytes_total: int = 512 * 1024 * 1024
    max_header_bytes: int = 64 * 1024  # request line, and each header
    max_headers: int = 256
    header_timeout: float = 10.0
    body_timeout: float = 60.0  # of silence
    client_write_timeout: float = 60.0  # without the client taking a byte
    keepalive_timeout: float = 75.0
    tokenize_concurrency: int = 16  # of passed POST routes such as /tokenize
    base_path: str = ""
    opened: tuple[str, ...] = ()  # routes.pass
    admin_opened: tuple[str, ...] = ()  # routes.admin_pass


@dataclass(frozen=True, slots=True)
class Backend:
    """One engine: its gate, its address, its adapter, and the reader of its request bodies."""

    keeper: Gatekeeper
    upstream: Upstream
    engine: Engine
    reader: Reader
