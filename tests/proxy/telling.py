"""An engine that stores responses, byte by byte, and those who wait for what becomes of them."""

import asyncio
import json
from collections.abc import Callable

import pytest

from kvctl.core.outcomes import EndReason
from kvctl.proxy import watching
from kvctl.proxy.told import Beginning, Told
from tests.proxy.harness import Rig, Wire, eventually, plain

PATH = "/v1/responses"
BODY = b'{"model":"m","input":"hi","background":true}'
SMALL = BODY[:-1] + b',"max_output_tokens":8}'
LOST = plain(b'{"error":{"message":"not found"}}', "404 Not Found")


def told(status: str, **more: object) -> bytes:
    """A response as the engine tells it."""
    document = {"id": "resp_a", "created_at": 5, "background": True, "status": status, "output": []}
    return plain(json.dumps(document | more).encode())


QUEUED = told("queued")
DONE = told("completed", usage={"input_tokens": 3, "output_tokens": 9, "total_tokens": 12})


class Telling:
    """Begins a response, and answers each question with the next of ``answers``, the last again and again."""

    def __init__(self, *answers: bytes, begin: bytes = QUEUED, held: asyncio.Event | None = None) -> None:
        self._answers = list(answers)
        self._begin = begin
        self._held = held
        self.begun = 0
        self.headers: list[dict[bytes, bytes]] = []  # of each question

    async def __call__(self, wire: Wire) -> None:
        while True:
            request = await wire.request()
            if request.line.startswith(b"POST"):
                self.begun += 1
                if self._held is not None:
                    await self._held.wait()
                await wire.send(self._begin)
            else:
                self.headers.append(dict(request.headers))
                left = self._answers
                await wire.send(left.pop(0) if len(left) > 1 else left[0])


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come without long pauses."""
    monkeypatch.setattr(watching, "LOOK_S", 0.02)
    monkeypatch.setattr(watching, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(watching, "LOOKS_PER_S", 1000.0)
    monkeypatch.setattr(watching, "BUSY_SHARE", 0)


async def begin(it: Rig, *lines: bytes) -> bytes:
    return await it.post(BODY, PATH, *lines)


async def ended(it: Rig, *reasons: EndReason) -> None:
    await eventually(lambda: len(it.reasons) == len(reasons))
    assert it.reasons == list(reasons)


CREATED = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_a","created_at":5,'
    b'"background":true,"status":"in_progress"}}\n\n'
)


def heard(feed: Callable[[Beginning], object], *, stream: bool) -> list[Told | None]:
    """What a beginning tells that is fed so."""
    told_of: list[Told | None] = []
    feed(Beginning(told_of.append, stream=stream))
    return told_of
