"""The two ends of an answer, for tests of what is between them."""

import asyncio

from kvctl.proxy.answer_ends import Swift
from kvctl.proxy.response import Response, UpstreamError


class Wire(asyncio.Protocol):
    """The connection's end of an answer. ``response`` gets what ``feed`` brings, ``swift`` first."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.response: Response | None = None
        self.swift: Swift | None = None

    def feed(self, data: bytes) -> None:
        """Bytes come, as at a transport."""
        (self.swift or self).data_received(data)

    def data_received(self, data: bytes) -> None:
        """What nobody before the connection took."""
        if self.response is not None:
            self.response.feed(data)

    def divert(self, response: Response, swift: Swift) -> None:
        """Let ``swift`` see it first."""
        self.response, self.swift = response, swift
        swift.behind = self

    def pause(self, response: Response) -> None:
        """Never: answers here are small."""

    def resume(self, response: Response) -> None:
        """Never either."""

    def unblock_writer(self) -> None:
        """Nobody writes."""

    def release(self, response: Response) -> None:
        self.swift = None
        self.told.append(f"released, reusable {response.reusable}")

    def abort(self) -> None:
        self.told.append("aborted")


class Taker:
    """Keeps an answer's body, and how its end was told."""

    def __init__(self) -> None:
        self.body = b""
        self.framed = b""
        self.end = "open"

    def data(self, data: bytes, framed: bytes = b"") -> None:
        self.body += data
        self.framed += framed

    def finished(self, error: UpstreamError | None) -> None:
        self.end = repr(error)
