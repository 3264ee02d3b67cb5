"""Where an answer of the engine goes, and how it ends if not well."""

from typing import Protocol


class UpstreamError(Exception):
    """The engine did not give a whole answer."""


class ConnectError(UpstreamError):
    """No connection came about: not one byte of the request was sent.

    ``own``: for want of descriptors, ports or memory on this side, which says nothing of the engine.
    """

    def __init__(self, message: str, *, own: bool = False) -> None:
        super().__init__(message)
        self.own = own


class BrokenError(UpstreamError):
    """The connection broke, or what came on it is not HTTP."""


class UpstreamTimeoutError(UpstreamError):
    """Nothing came from the engine for the configured time."""


class Swift(Protocol):
    """Takes the usual chunks of an answer with less ado than a sink. Must not block or raise."""

    def take(self, chunk: bytes) -> bool:
        """Take what came if it is one whole chunk like those before; False: it is not, and is not taken."""


class Sink(Protocol):
    """Takes an answer's body as it comes. Called from the connection's callbacks: must not block or raise."""

    def data(self, data: bytes, framed: bytes = b"") -> None:
        """More of the body, without its transfer framing; ``framed``: as it came, where it came in chunks."""

    def finished(self, error: UpstreamError | None) -> None:
        """The answer is over: whole (None), or broken off."""
