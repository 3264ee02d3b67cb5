"""When to come back for a place among the responses that are generated in the background."""

from collections.abc import Mapping

import pytest

from kvctl.control.gatekeeper import LeaseHandle
from kvctl.core.claim import Shape
from kvctl.core.outcomes import EndReason, RejectReason
from kvctl.engines.base import Api
from kvctl.engines.vllm import VLLM
from kvctl.proxy.afterlife import Afterlife
from kvctl.proxy.background import BackgroundLease
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.planning import Reading
from kvctl.proxy.pool import Upstream
from kvctl.proxy.routes import Action, Match
from kvctl.proxy.seams import Backend, Lane
from kvctl.tokens.base import CountMethod
from tests.control.test_decision_log import Office
from tests.proxy.harness import WordCounter

SHAPE = Shape(route="responses", model="m", prompts=(10,), asked_output=20, stream=False, tenant="")
HEADERS: Mapping[str, str] = {}
MATCH = Match(Action.GENERATE, "/v1/responses", b"/v1/responses")


class Places:
    """``most`` of them, before a gate with a clock that is set by hand."""

    def __init__(self, most: int) -> None:
        self.office = Office()
        self.afterlife = Afterlife(most, lambda: self.office.now, 60.0)
        adapter = VLLM()
        backend = Backend(
            Upstream("http://127.0.0.1:1"),
            adapter,
            Reader(WordCounter(), adapter),
            [Lane(self.office.keeper)],
        )
        parsed = Parsed(shape=SHAPE, stream=False, count_method=CountMethod.BOUND, count_seconds=0.0)
        self.reading = Reading(backend, MATCH, b"", parsed)

    async def take(self, name: str) -> BackgroundLease:
        lease = await self.office.keeper.admit(name, SHAPE)
        assert isinstance(lease, LeaseHandle)
        return self.afterlife.taken(lease, self.reading, HEADERS)

    def wait_s(self) -> float:
        told = self.afterlife.refusal("late", SHAPE)
        assert told is not None
        assert (told.reason, told.prompt_tokens) == (RejectReason.BACKGROUND_RESPONSES, 10)
        assert told.retry_after_s is not None
        return told.retry_after_s


async def test_it_goes_by_the_pace_at_which_places_became_free() -> None:
    places = Places(1)
    for number in range(5):
        lease = await places.take(str(number))
        places.office.now += 2.0
        lease.over(EndReason.FINISHED)
    await places.take("long")
    assert 1.6 <= places.wait_s() <= 2.4  # five in eight seconds; up to half as long again
    places.office.now += 60.0
    assert places.wait_s() >= 1.0  # nothing is known any more


async def test_without_a_pace_it_grows_with_the_time_for_which_callers_were_refused() -> None:
    places = Places(1)
    lease = await places.take("long")
    assert 1.0 <= places.wait_s() <= 1.5
    places.office.now += 8.0
    assert 8.0 <= places.wait_s() <= 12.0
    places.office.now += 1000.0
    assert 40.0 <= places.wait_s() <= 60.0
    lease.over(EndReason.FINISHED)
    await places.take("next")
    assert 1.0 <= places.wait_s() <= 1.5  # somebody got in: another streak


@pytest.mark.parametrize("most", [0, 1])
async def test_a_place_is_free_or_none_is_allowed(most: int) -> None:

    forbidden = Places(most).afterlife.forbidden(Api.OPENAI)
    assert (forbidden is None) is bool(most)
    assert (Places(most).afterlife.refusal("l", SHAPE) is None) is bool(most)
