"""Whatever makes a tokenizer doubted or trusted again is told, once and by name."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvctl.control.tokenizer_check import TokenizerCheck
from kvctl.core.events import EngineRestarted, Noted
from kvctl.core.outcomes import Note
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.calibration import MOST_WRONG
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.load import load_counter
from tests.tokens.tiny import write

DESCRIBED = Noted(Note.ENGINE_DESCRIBED, "engine serves tiny")
RESTARTED = EngineRestarted("0")


class Engine:
    """An engine's /tokenize that is off by ``off``; ``status`` 404: it has none."""

    def __init__(self, folder: Path) -> None:
        self.own = load_counter(str(folder))
        self.off = 0
        self.status = 200

    async def __call__(self, body: bytes) -> tuple[int, bytes]:
        asked: dict[str, Any] = json.loads(body)
        if "messages" in asked:
            count = await self.own.count_chat("m", asked, 100)
        else:
            count = await self.own.count_text("m", [asked["prompt"]])
        return self.status, json.dumps({"count": count.prompts[0] + self.off}).encode()


async def settle(check: TokenizerCheck) -> None:
    assert check._task is not None
    await asyncio.gather(check._task)


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [word for record in caplog.records if (word := record.__dict__.get("kvctl_event"))]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(write(tmp_path))


@pytest.fixture
def counter(engine: Engine, tmp_path: Path) -> ChainCounter:
    return load_counter(str(tmp_path), ask=engine)


async def test_an_engine_of_another_model_and_back(
    engine: Engine, counter: ChainCounter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check = TokenizerCheck(counter, lambda: ("m",), "east")
    check(DESCRIBED)
    await settle(check)
    assert not counter.doubted
    assert not words(caplog)
    engine.off = 1
    for _ in range(2):
        check(RESTARTED)
        await settle(check)
    assert counter.doubted
    assert "5 of 5 probes" in counter.status().doubted
    engine.off = 0
    check(RESTARTED)
    await settle(check)
    assert not counter.doubted
    assert words(caplog) == ["tokenizer_doubted", "tokenizer_trusted"]
    await check.close()
    await counter.close()


async def test_traffic_is_told_too(counter: ChainCounter, caplog: pytest.LogCaptureFixture) -> None:
    check = TokenizerCheck(counter, lambda: (), "east")
    check(DESCRIBED)  # nobody knows what it serves: nothing is asked
    for _ in range(MOST_WRONG):
        counter.learn(Count(prompts=(10,), method=CountMethod.LOCAL, seconds=0.1), 12)
    assert "5 of the last 5 requests count otherwise" in caplog.text
    await check.close()
    await counter.close()


async def test_another_engine_that_cannot_be_asked_is_given_the_benefit_of_the_doubt(
    engine: Engine, counter: ChainCounter
) -> None:
    check = TokenizerCheck(counter, lambda: ("m",), "east")
    for _ in range(MOST_WRONG):
        counter.learn(Count(prompts=(10,), method=CountMethod.LOCAL, seconds=0.1), 12)
    engine.status = 404
    check(DESCRIBED)
    await settle(check)
    assert counter.doubted
    check(RESTARTED)
    await settle(check)
    assert not counter.doubted
    await check.close()
    await counter.close()


async def test_the_end_of_a_counting_process_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counter = await asyncio.to_thread(load_counter, str(write(tmp_path)), isolated=True)
    check = TokenizerCheck(counter, lambda: (), "east")
    assert counter.own is not None
    counter.own.lost("the process that counts tokens ended (-11) over 1 counts")
    assert words(caplog) == ["tokens_crashed"]
    await check.close()
    await counter.close()
