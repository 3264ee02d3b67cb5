"""One request and what is known of it so far."""

from aiohttp import web

from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.proxy.cors import Origins
from kvctl.proxy.errors import Answer
from kvctl.proxy.flow import Relayed
from kvctl.proxy.relay import Written, write_answer
from kvctl.proxy.response import Headers
from kvctl.proxy.routes import Match
from kvctl.proxy.seams import Served

_LONGEST_ID = 256


class Exchange:
    """One request, from its arrival to the ``Served`` record of it.

    ``id`` is the client's X-Request-Id where it sent a usable one; ``lease_id`` is kvctl's own and unique.
    """

    __slots__ = (
        "_origins", "arrived", "end", "engine", "extra", "id", "keeps", "lease_id", "match",
        "prompt_tokens", "reject", "relayed", "request", "signs", "status", "stream",
    )  # fmt: skip

    def __init__(
        self, request: web.BaseRequest, match: Match, lease_id: str, arrived: float, origins: Origins
    ) -> None:
        self.request = request
        self._origins = origins
        self.match = match
        self.lease_id = lease_id
        self.id = _usable_id(request.headers.get("X-Request-Id")) or lease_id
        self.arrived = arrived
        self.status = 0
        self.engine: str | None = None
        self.keeps = False  # the engine may keep the conversation
        self.extra: Headers = []  # what kvctl adds to the engine's headers
        self.signs: tuple[tuple[bytes, bytes], ...] = ()  # what load balancers read, on every answer
        self.stream = False
        self.prompt_tokens: int | None = None
        self.relayed: Relayed | None = None
        self.reject: RejectReason | None = None
        self.end: EndReason | None = None

    def answer(self, answer: Answer) -> Written:
        """Write one of kvctl's own answers."""
        self.status = answer.status
        cross_origin = self._origins.headers_for(self.request)
        if cross_origin:
            answer = Answer(answer.status, (*answer.headers, *cross_origin), answer.body)
        if self.signs:
            told = ((name.decode(), value.decode()) for name, value in self.signs)
            answer = Answer(answer.status, (*answer.headers, *told), answer.body)
        return write_answer(self.request, answer, request_id=self.id)

    def record(self, now: float) -> Served:
        """The request after its end."""
        relayed = self.relayed
        first = relayed.first_byte_at if relayed is not None else None
        return Served(
            request_id=self.id,
            method=self.request.method,
            route=self.match.name,
            status=self.status,
            seconds=now - self.arrived,
            first_byte_s=None if first is None else first - self.arrived,
            stream=self.stream,
            prompt_tokens=self.prompt_tokens,
            output_tokens=None if relayed is None else relayed.output_tokens,
            reject=self.reject,
            end=self.end,
            engine=self.engine,
        )


def _usable_id(value: str | None) -> str | None:
    return value if value and value.isascii() and value.isprintable() and len(value) <= _LONGEST_ID else None
