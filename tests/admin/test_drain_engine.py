"""Drain of one engine of several, by the admin API and by its command."""

import pytest

from kvctl.admin.client import ClientError
from tests.admin.conftest import ENGINE, Office


async def test_one_engine_is_drained_and_taken_back(office: Office) -> None:
    answer = await office.call("post", f"/v1/drain?engine={ENGINE}")
    assert answer == {"mode": "active", "kept": True, "engine": ENGINE}
    assert office.stand.drained_engines == {ENGINE: True}
    assert not office.stand.draining
    await office.call("post", f"/v1/undrain?engine={ENGINE}")
    assert office.stand.drained_engines == {ENGINE: False}


async def test_an_engine_that_is_not_there(office: Office) -> None:
    with pytest.raises(ClientError, match="there is no engine 'x'"):
        await office.call("post", "/v1/drain?engine=x")
    assert office.stand.drained_engines == {}
