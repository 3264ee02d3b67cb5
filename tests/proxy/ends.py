"""The two ends of an answer, for tests of what is between them."""

from kvctl.proxy.response import Response, UpstreamError


class Wire:
    """The connection's end of an answer."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self, response: Response) -> None:
        """Never: answers here are small."""

    def resume(self, response: Response) -> None:
        """Never either."""

    def unblock_writer(self) -> None:
        """Nobody writes."""

    def release(self, response: Response) -> None:
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
