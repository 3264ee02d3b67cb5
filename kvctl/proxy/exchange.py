"""One request and what is known of it so far."""

import msgspec
from aiohttp import web

from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.proxy.cors import Origins
from kvctl.proxy.errors import Answer
from kvctl.proxy.flow import Metered, Relayed
from kvctl.proxy.relay import Written, write_answer
from kvctl.proxy.response import Headers
from kvctl.proxy.routes import Match
from kvctl.proxy.seams import Served

_LONGEST_ID = 256


class Exchange(msgspec.Struct, eq=False):
    """One request, from its arrival to the ``Served`` record of it.

    ``id`` is the client's X-Request-Id where it sent a usable one; ``lease_id`` is kvctl's own and unique.
    ``signs`` are headers that load balancers read, on every answer; ``extra`` what is added to the engine's.
    """

    request: web.BaseRequest
    match: Match
    lease_id: str
    id: str
    arrived: float
    origins: Origins
    signs: tuple[tuple[bytes, bytes], ...] = ()
    asked: float = 0.0  # when its gate was
    status: int = 0
    engine: str | None = None
    keeps: bool = False  # the engine may keep the conversation
    extra: Headers = []
    stream: bool = False
    prompt_tokens: int | None = None
    relayed: Relayed | None = None
    metered: Metered | None = None  # what is relayed, where it has a lease
    reject: RejectReason | None = None
    end: EndReason | None = None

    def answer(self, answer: Answer) -> Written:
        """Write one of kvctl's own answers."""
        self.status = answer.status
        cross_origin = self.origins.headers_for(self.request)
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


def id_of(request: web.BaseRequest, otherwise: str) -> str:
    """The client's X-Request-Id where it is one that may be echoed."""
    sent = request.headers.get("X-Request-Id")
    if sent is None:
        return otherwise
    return sent if 0 < len(sent) <= _LONGEST_ID and sent.isascii() and sent.isprintable() else otherwise
