"""Law 1: nothing that was admitted is lost from the ledger, whatever fails on the way to the engine."""

import time

import pytest

from kvctl.core.outcomes import EndReason
from kvctl.fleet.face import NOBODY, Face
from kvctl.proxy.seams import ProxyConfig
from tests.proxy.harness import CHAT, rig
from tests.proxy.telling import DONE, QUEUED, SMALL, Telling

PATHS = {"/v1/chat/completions": CHAT, "/v1/responses": SMALL}


class Broken(Face):
    """Signs of a machine whose arithmetic fails."""

    def admitted(self) -> None:
        broken()


def broken(*_: object) -> None:
    raise OverflowError("a sum that does not add up")


@pytest.mark.parametrize("path", PATHS)
async def test_a_figure_that_cannot_be_noted_costs_no_lease(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(Telling(QUEUED, DONE)) as it:
        with monkeypatch.context() as patched:
            patched.setattr(it.seen, "decided", broken)
            answer = await it.post(PATHS[path], path)
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert it.reasons == [EndReason.CANCELLED]
        assert len(it.gate.ledger) == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_sign_that_cannot_be_set_costs_no_lease(path: str) -> None:
    config = ProxyConfig(face=Broken(time.monotonic, NOBODY))
    async with rig(Telling(QUEUED, DONE), config=config) as it:
        assert (await it.post(PATHS[path], path)).startswith(b"HTTP/1.1 500 ")
        assert it.reasons == [EndReason.CANCELLED]
        assert it.proxy.background_responses == 0
