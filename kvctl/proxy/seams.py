"""What the proxy needs from the rest: its settings, where it reports, and the engines behind it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.choice import WarmPrefixes
from kvctl.core.outcomes import SERVING, ChoiceReason, EndReason, ProxyFault, RejectReason
from kvctl.engines.base import Engine
from kvctl.fleet.face import NOBODY, Face
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.proxy.tenancy import Tenancy
from kvctl.tokens.base import CountMethod

Readiness = Callable[[], tuple[bool, str]]  # (ready, the reason in words)


class Served(msgspec.Struct, frozen=True, kw_only=True):
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
    engine: str | None = None  # of several; None: there is one, or none was asked


class ProxyMetrics(Protocol):
    """Takes everything that is to be counted. Called on the loop: must be quick."""

    def served(self, record: Served) -> None:
        """A request is over."""

    def counted(self, method: CountMethod, seconds: float) -> None:
        """A prompt was counted."""

    def decided(self, seconds: float) -> None:
        """The gate took that time to decide on a request."""

    def fault(self, word: ProxyFault) -> None:
        """Something went wrong."""

    def chosen(self, engine: str, reason: ChoiceReason) -> None:
        """A request was sent to ``engine``'s gate, which was chosen of several gates."""


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
    client_write_timeout: float = 60.0  # during which the client takes not a byte
    keepalive_timeout: float = 75.0
    first_event_peek: float = 0.0  # longest that a stream's head waits for its first event; 0: not at all
    stream_heartbeat: float = 0.0  # silence of an event stream until a comment is sent; 0: never
    tokenize_concurrency: int = 16  # of passed POST routes such as /tokenize
    background_responses: int = 1000  # most that are generated in the background at once; 0: none may be
    base_path: str = ""
    opened: tuple[str, ...] = ()  # routes.pass
    admin_opened: tuple[str, ...] = ()  # routes.admin_pass
    tenancy: Tenancy = field(default_factory=lambda: Tenancy({}))
    face: Face = field(default_factory=lambda: Face(time.monotonic, NOBODY))


@dataclass(frozen=True, slots=True)
class Lane:
    """One gate of an engine: the engine as a whole, or one rank that a request can be pinned to."""

    keeper: Gatekeeper
    rank: str | None = None
    warm: WarmPrefixes = field(default_factory=WarmPrefixes)


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """One engine: its address, its adapter, the reader of its request bodies, and its gates.

    ``models`` are the names that the operator says it serves; empty: those that it reports. ``tokenizer`` is
    what its reader counts with: bodies are read once for engines that read them alike. ``lanes`` is never
    empty; its owner may change what is in it. ``drains``: an answer is read to its end though its client has
    left.
    """

    upstream: Upstream
    engine: Engine
    reader: Reader
    lanes: list[Lane]
    name: str = "engine"
    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    drains: bool = False
    authorization: str | None = field(default=None, repr=False)  # kvctl's own, for its own questions

    @property
    def serving(self) -> bool:
        """Whether any of its gates may admit."""
        return any(lane.keeper.gate.state in SERVING and not lane.keeper.gate.draining for lane in self.lanes)

    def known_models(self) -> tuple[str, ...]:
        """The names that it serves, as far as is known."""
        return self.models or self.lanes[0].keeper.gate.models

    def serves(self, model: str) -> bool:
        """Whether it is known to serve ``model``, under that name or by an alias."""
        return model in self.aliases or model in self.known_models()

    def own_name(self, model: str) -> str:
        """What the engine itself calls ``model``."""
        return self.aliases.get(model, model)

    def lanes_for(self, rank: str | None) -> list[Lane]:
        """The gates for a request that names ``rank`` (None: any)."""
        return [lane for lane in self.lanes if rank is not None and lane.rank == rank] or self.lanes

    def connect_failed(self) -> None:
        """The data plane could not reach it."""
        for lane in self.lanes:
            lane.keeper.connect_failed()
