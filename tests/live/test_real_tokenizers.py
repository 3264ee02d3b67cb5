"""Vocabularies and templates of real models, on random weights: kvctl counts as the engine does.

All of them take a start of the engine each. ``REAL_TOKENIZERS`` (names, with commas) says which; by default
it is one.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.routes import Router
from kvctl.tokens.base import CountMethod
from kvctl.tokens.foreign import Interpreter
from kvctl.tokens.load import load_counter
from tests.live.engine import Engine
from tests.live.model import NAME
from tests.live.requests import CHAT, COMPLETIONS, Request, requests
from tests.live.wire import post
from tests.tokens.real import real_model

NAMES = (os.environ.get("REAL_TOKENIZERS") or "qwen3").split(",")


@pytest.fixture(scope="module", params=NAMES)
def real_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = real_model(request.param)
    log = tmp_path_factory.mktemp("engine") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MLA_DISABLE", "1")  # a random Llama, though its config says deepseek_v3
        with Engine(num_gpu_blocks=600, log=log, folder=folder) as running:
            yield running


def _true(engine: Engine, asked: Request) -> int | None:
    """What /tokenize says; None: it refuses."""
    answer = post(engine.base_url + "/tokenize", asked[1])
    return int(answer.json["count"]) if answer.status == 200 else None


async def _own(engine: Engine, asked: list[Request]) -> list[Parsed | None]:
    async def ask(path: str, body: bytes) -> tuple[int, bytes]:
        answer = await asyncio.to_thread(post, engine.base_url + path, body)
        return answer.status, answer.body

    counter = await asyncio.to_thread(load_counter, str(engine.model), ask=Interpreter(ask))
    assert await counter.verify(NAME) == 0
    assert counter.own is not None
    assert counter.own.keeps
    reader, router, read = Reader(counter, VLLM()), Router(VLLM().routes), list[Parsed | None]()
    for path, body in asked:
        route = router.match("POST", path).route
        assert route is not None
        found = await reader.read(route, {"content-type": "application/json"}, json.dumps(body).encode())
        read.append(found if isinstance(found, Parsed) else None)
    assert not counter.doubted
    await counter.close()
    return read


def _comparable(asked: Request) -> bool:
    path, body = asked
    if "reasoning_effort" in body:  # /tokenize does not know it
        return False
    return path == CHAT or (path == COMPLETIONS and isinstance(body["prompt"], str))


def test_counts_are_the_engines(real_engine: Engine) -> None:
    asked = [each for each in requests() if _comparable(each)]
    with ThreadPoolExecutor(4) as pool:
        true = list(pool.map(lambda each: _true(real_engine, each), asked))
    own = asyncio.run(_own(real_engine, asked))
    wrong, compared = [], 0
    for each, mine, told in zip(asked, own, true, strict=True):
        if told is None or mine is None:
            continue
        compared += 1
        if mine.shape.prompts != (told,) or not mine.shape.exact:
            wrong.append(f"{mine.shape.prompts} ({mine.count_method}) is not {told}: {str(each)[:300]}")
    assert not wrong, f"{len(wrong)} of {compared}:\n" + "\n".join(wrong[:20])
    assert compared >= 50
    assert sum(mine is not None and mine.count_method is CountMethod.LOCAL for mine in own) >= 50
