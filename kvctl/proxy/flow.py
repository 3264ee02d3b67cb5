"""One admitted request, from its lease to the end of its answer.

Law 1: one lease, ended once. The lease is a context manager around everything here, and ``finished`` ends it
at the moment when the engine's part is over, whatever the client still has to read.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

from kvctl import logs
from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.outcomes import EndReason
from kvctl.proxy.conversations import AnswerTail
from kvctl.proxy.express import Express
from kvctl.proxy.relay import ClientStream
from kvctl.proxy.response import Response, UpstreamError, UpstreamTimeoutError
from kvctl.proxy.sniffer import Findings, NoSniffer, Sniffer, StreamSniffer, sniffer_for

log = logs.get("proxy")

_UNCOUNTED = "an answer is relayed without being counted"
_ID_WITHIN = 4096  # bytes from the start of an answer
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[!#-\[\]-~]{1,200})"')


class Relayed:
    """An unmetered answer on its way from the engine to the client: no lease, nothing counted."""

    __slots__ = ("_clock", "error", "first_byte_at", "response", "stream")

    def __init__(self, response: Response, stream: ClientStream, clock: Callable[[], float]) -> None:
        self.response = response
        self.stream = stream
        self.error: UpstreamError | None = None
        self.first_byte_at: float | None = None
        self._clock = clock

    @property
    def at_border(self) -> bool:
        """Whether an event may be added behind what came."""
        return False

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, where they are known."""
        return None

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body."""
        if self.first_byte_at is None:
            self.first_byte_at = self._clock()
        self.stream.data(data, framed)

    def finished(self, error: UpstreamError | None) -> None:
        """The engine's part is over."""
        self.error = error
        if error is None:
            self.stream.finish()


class Along(Protocol):
    """Reads an answer's bytes on the side, as they pass."""

    def feed(self, data: bytes) -> "Along | None":
        """More of the body; None: it has seen enough."""


class IdWatch:
    """Looks for the id of a stored response in the first bytes of an answer, and tells it once."""

    __slots__ = ("_head", "_tell")

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._head = b""

    def feed(self, data: bytes) -> "IdWatch | None":
        """More of the body; None: there is nothing more to look for."""
        self._head += data[:_ID_WITHIN]
        found = _RESPONSE_ID.search(self._head)
        if found is not None:
            self._tell(found[1].decode())
        return self if found is None and len(self._head) < _ID_WITHIN else None


class Metered(Relayed):
    """A generation's answer: its tokens are counted on the side, and its lease ends with it.

    A chunk that holds exactly one event like those before it is passed as it came, and only counted
    (``proxy.express``).
    """

    __slots__ = ("_express", "_lease", "_sniffer", "_watch", "end", "tail")

    def __init__(
        self,
        response: Response,
        stream: ClientStream,
        clock: Callable[[], float],
        lease: LeaseHandle,
        *,
        watch: Along | None = None,
        tail: AnswerTail | None = None,
    ) -> None:
        super().__init__(response, stream, clock)
        self._lease = lease
        self._watch = watch
        self.tail = tail
        self._sniffer = _sniffer_of(response)
        self._express: Express | None = None
        self.end: EndReason | None = None
        if response.status >= 400:
            self.close(EndReason.ENGINE_REFUSED)  # the engine holds nothing for it any more

    @property
    def at_border(self) -> bool:
        """Whether an event may be added behind what came."""
        return self._sniffer.at_border

    @property
    def output_tokens(self) -> int | None:
        """By the engine's usage, else as counted."""
        found = self._found()
        return found.output_tokens if found.output_tokens is not None else (found.tokens or None)

    @property
    def prompt_tokens(self) -> int | None:
        """By the engine's usage; None: it did not say."""
        return self._sniffer.found.prompt_tokens

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body: first to the client, then to the accounting."""
        if self.first_byte_at is None:
            self.first_byte_at = self._clock()
        self.stream.data(data, framed)
        try:
            if self._watch is not None:
                self._watch = self._watch.feed(data)
            if self.tail is not None:
                self.tail.feed(data)
            if self._express is not None:
                self._found()
            tokens = self._sniffer.feed(data)
            if tokens:
                self._lease.progress(tokens)
            if framed or self._express is not None:
                self._look_for_likes()
        except Exception:
            log.exception(_UNCOUNTED)
            self._read_no_more()

    def _look_for_likes(self) -> None:
        """Let ``express`` take events like the last one, unless somebody else reads them on the side."""
        sniffer, express, like = self._sniffer, self._express, None
        alone = self._watch is None and self.tail is None and self.stream.takes_chunks
        if alone and isinstance(sniffer, StreamSniffer):
            like = sniffer.like
        if express is not None:
            express.like = like
        elif like is not None:
            self._express = express = Express(self.response, self.stream, self._lease)
            express.like = like
            self.response.divert(express)

    def _found(self) -> Findings:
        """What the answer showed so far."""
        sniffer, express = self._sniffer, self._express
        if express is not None and express.taken and isinstance(sniffer, StreamSniffer):
            if express.like is not None:
                sniffer.pieces(express.like, express.taken)
            express.taken = 0
        return sniffer.found

    def finished(self, error: UpstreamError | None) -> None:
        """The engine's part is over."""
        super().finished(error)
        if error is None:
            try:
                self._found()
                self._sniffer.end()
            except Exception:
                log.exception(_UNCOUNTED)
                self._read_no_more()
        if self.end is None:
            self.close(end_reason(self._found(), error))

    def _read_no_more(self) -> None:
        """An error in the accounting must neither break the relay nor keep the lease open."""
        self._sniffer, self._watch, self.tail = NoSniffer(), None, None
        if self._express is not None:
            self._express.like = None

    def close(self, reason: EndReason) -> None:
        """End the lease with what is known; the first reason counts."""
        if self.end is None:
            self.end = reason
            found = self._found()
            self._lease.end(reason, output_tokens=found.output_tokens, prompt_tokens=found.prompt_tokens)


def end_reason(found: Findings, error: UpstreamError | None) -> EndReason:
    """How an answer with a good status ended."""
    if isinstance(error, UpstreamTimeoutError):
        return EndReason.TIMEOUT
    if error is not None:
        return EndReason.ENGINE_ERROR
    if found.error:
        return EndReason.ENGINE_ERROR if found.tokens else EndReason.ENGINE_REFUSED
    if found.recognised and not found.finished and found.tokens:
        return EndReason.ENGINE_ERROR  # closed cleanly in the middle of a generation
    return EndReason.CAPPED if found.capped else EndReason.FINISHED


def _sniffer_of(response: Response) -> Sniffer:
    if response.status != 200:
        return NoSniffer()
    return sniffer_for(response.content_type, response.content_encoding)


class Flight:
    """A request under way, as the drain sees it: it may be cut, once."""

    __slots__ = ("_task", "cut_short")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.cut_short = False

    def cut(self) -> None:
        """The drain's time is over: the lease ends with ``shutdown``, the stream is broken off."""
        if self._task is not None and not self.cut_short:
            self.cut_short = True
            self._task.cancel()
