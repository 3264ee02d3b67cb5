"""The errors with which an engine's answer can end, and the interfaces that its bytes go through."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class UpstreamError(Exception):
    """The engine did not give a whole answer."""


class ConnectError(UpstreamError):
    """No connection was made: not one byte of the request was sent.

    ``own``: this side lacked descriptors, ports or memory, which says nothing about the engine.
    """

    def __init__(self, message: str, *, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class BrokenError(UpstreamError):
    """The connection broke, or what arrived on it is not HTTP."""


class UpstreamTimeoutError(UpstreamError):
    """Nothing arrived from the engine for the configured time."""


class Swift(asyncio.Protocol):
    """Takes the connection's place at the engine's transport for one answer; hands on what it cannot handle.

    ``behind``: the connection. ``noted``: called, where not None, for each read that is not handed on.
    """

    __slots__ = ("behind", "noted")

    def __init__(self) -> None:
        self.behind: asyncio.Protocol | None = None
        self.noted: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.behind is not None:
            self.behind.data_received(data)

    def eof_received(self) -> bool | None:
        """The engine closed its side."""
        return None if self.behind is None else self.behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self.behind is not None:
            self.behind.connection_lost(exc)

    def pause_writing(self) -> None:
        """The socket takes no more of the request."""
        if self.behind is not None:
            self.behind.pause_writing()

    def resume_writing(self) -> None:
        """The socket takes more."""
        if self.behind is not None:
            self.behind.resume_writing()


class Sink(Protocol):
    """Takes an answer's body as it comes. Called from the connection's callbacks: must not block or raise."""

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body, without its chunk framing; ``framed``: the same with it, where it had one."""

    def finished(self, error: UpstreamError | None) -> None:
        """The answer is over: whole (``error`` is None), or broken off."""
