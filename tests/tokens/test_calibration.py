"""A tokenizer that does not match the served model is found out by traffic, and trusted again."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.calibration import ENOUGH_RIGHT, MOST_WRONG, WINDOW, Calibration, Witness
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.files import load_files
from kvctl.tokens.load import load_counter
from tests.tokens.tiny import train, write

USER = {"role": "user", "content": "The quick brown fox jumps over the lazy dog"}


def local(*prompts: int) -> Count:
    return Count(prompts=prompts, method=CountMethod.LOCAL, seconds=0.001)


def test_usage_that_differs_is_believed_before_the_window_is_full() -> None:
    counter, told = ChainCounter([]), list[str]()
    counter.calibration.changed = told.append
    requests = 0
    while not counter.doubted:
        counter.learn(local(50, 10), 61)
        requests += 1
    assert requests == MOST_WRONG < WINDOW
    assert "60 tokens, 61 by the engine" in told[0]
    assert counter.calibration.why == told[0]


def test_one_odd_shape_among_many_is_no_other_model() -> None:
    found = Calibration()
    for number in range(400):
        found.saw(Witness.USAGE, 100, 101 if number % 10 == 0 else 100)
    assert not found.doubted
    assert found.error_ratio == pytest.approx(2 / 2002)
    assert found.samples == {(Witness.USAGE, True): 360, (Witness.USAGE, False): 40}


def test_trust_comes_back_and_each_time_later() -> None:
    found, told = Calibration(), list[str]()
    found.changed = told.append
    for needed in (ENOUGH_RIGHT, 2 * ENOUGH_RIGHT, 4 * ENOUGH_RIGHT):
        for _ in range(MOST_WRONG):
            found.saw(Witness.USAGE, 9, 10)
        assert found.doubted
        for _ in range(needed - 1):
            found.saw(Witness.TOKENIZE, 10, 10)
        assert found.doubted
        found.saw(Witness.TOKENIZE, 10, 10)
        assert not found.doubted
    assert len(told) == 6
    found.probed(0, 5)
    for _ in range(MOST_WRONG):
        found.saw(Witness.USAGE, 9, 10)
    for _ in range(ENOUGH_RIGHT):
        found.saw(Witness.TOKENIZE, 10, 10)
    assert not found.doubted


def test_nothing_compared_is_no_ratio_of_zero() -> None:
    assert Calibration().error_ratio is None


def test_asking_the_engine_is_bounded() -> None:
    found = Calibration()
    assert [found.due(0.0) for _ in range(WINDOW + 2)] == [True] * WINDOW + [False] * 2
    assert found.due(100.0)
    assert not found.due(101.0)
    found.sampling = 4
    assert not found.due(1000.0)


class Served:
    """An engine's /tokenize, with the tokenizer of a model that can be changed."""

    def __init__(self, folder: Path) -> None:
        self.counter = load_counter(str(folder))
        self.asked = 0

    async def __call__(self, body: bytes) -> tuple[int, bytes]:
        self.asked += 1
        asked: dict[str, Any] = json.loads(body)
        if "messages" in asked:
            count = await self.counter.count_chat("m", asked, len(body))
        else:
            specials = asked["add_special_tokens"]
            count = await self.counter.count_text("m", [asked["prompt"]], add_special_tokens=specials)
        return 200, json.dumps({"count": count.prompts[0]}).encode()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(write(tmp_path / "own"))
    yield made
    await made.counter.close()


def other_model(folder: Path) -> Path:
    """The same template over another vocabulary."""
    write(folder)
    smaller = train().to_str()
    data = json.loads(smaller)
    data["model"]["merges"] = data["model"]["merges"][:40]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


async def count_some(counter: ChainCounter, requests: int) -> list[CountMethod]:
    methods = []
    for number in range(requests):
        body = {"messages": [{"role": "user", "content": f"{number}: {USER['content']}"}]}
        methods.append((await counter.count_chat("m", body, 100)).method)
        await asyncio.sleep(0.01)
    return methods


async def test_another_models_tokenizer_is_found_out_within_20_requests(
    tmp_path: Path, served: Served
) -> None:
    counter = load_counter(str(other_model(tmp_path / "other")), ask=served)
    methods = await count_some(counter, 20)
    assert methods[0] is CountMethod.LOCAL
    assert methods[-1] is CountMethod.ENGINE
    assert counter.doubted
    await counter.close()


async def test_it_is_trusted_again_when_the_engine_serves_its_model(tmp_path: Path, served: Served) -> None:
    folder = other_model(tmp_path / "other")
    counter = load_counter(str(folder), ask=served)
    await count_some(counter, 10)
    assert counter.doubted
    own, served.counter = served.counter, load_counter(str(folder))
    await own.close()
    methods = await count_some(counter, 40)
    assert methods[0] is CountMethod.ENGINE
    assert methods[-1] is CountMethod.LOCAL
    await counter.close()


async def test_a_right_one_is_asked_for_now_and_then_only(tmp_path: Path, served: Served) -> None:
    counter = load_counter(str(tmp_path / "own"), ask=served)
    assert set(await count_some(counter, 60)) == {CountMethod.LOCAL}
    assert WINDOW <= served.asked <= WINDOW + 2
    assert counter.calibration.error_ratio == 0
    await counter.close()


async def test_media_that_take_more_than_their_bound_raise_it(tmp_path: Path) -> None:
    counter = load_counter(str(write(tmp_path)), media_tokens={"image": 100})
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]}
    count = await counter.count_chat("m", body, 100)
    assert count.media == 100
    counter.learn(count, count.prompts[0] - 40)
    assert counter.media_scale == 1.0
    counter.learn(count, count.prompts[0] + 150)
    again = await counter.count_chat("m", body, 100)
    assert (again.prompts[0], again.method) == (count.prompts[0] + 150, CountMethod.BOUND)
    assert not counter.calibration.samples
    await counter.close()


@pytest.mark.parametrize("newer", [False, True])
async def test_a_llama_tokenizer_is_loaded_the_way_that_the_engine_does(tmp_path: Path, newer: bool) -> None:
    """Off by one where a text begins with a space: which way is right is the engine's libraries' affair."""
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    folder = write(tmp_path, config)
    data = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace],
    }
    data["pre_tokenizer"] = None
    data["model"]["vocab"]["\u2581"] = len(data["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(data))
    files = load_files(folder)
    assert files.load_again is not None
    true = files.load_again(newer)

    async def ask(body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body)
        if "messages" in asked:
            return 404, b""
        return 200, json.dumps({"count": len(true.encode(asked["prompt"]))}).encode()

    counter = load_counter(str(folder), ask=ask)
    assert await counter.verify("m") == 0
    for text in (" leading", "x  y", "plain"):
        assert (await counter.count_text("m", [text])).prompts == (len(true.encode(text)),)
    await counter.close()
