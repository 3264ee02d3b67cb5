"""Over 500 varied requests: counted as the engine counts them, and claimed for what it ends up holding."""

import asyncio
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvctl.core.claim import Claim, Limits, claim
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.routes import Router
from kvctl.tokens.base import CountMethod
from kvctl.tokens.load import load_counter
from tests.live.engine import Engine, forced_length
from tests.live.requests import RESPONSES, Body, Request, limited, requests, used
from tests.live.wire import post

JSON = {"content-type": "application/json"}
CORPUS = list(requests())


async def _read_all(engine: Engine, asked: list[Request]) -> list[Parsed | str]:
    counter = await asyncio.to_thread(load_counter, str(engine.model))
    reader = Reader(
        counter, VLLM(), vocab_size=counter.vocab_size, context=lambda: engine.max_model_len, max_logprobs=20
    )
    router, read = Router(VLLM().routes), list[Parsed | str]()
    for path, body in asked:
        route = router.match("POST", path).route
        assert route is not None
        found = await reader.read(route, JSON, json.dumps(body).encode())
        read.append(found if isinstance(found, Parsed) else found.message)
    await counter.close()
    return read


def _ask(engine: Engine, asked: Request) -> Body | str:
    """The engine's answer, or its refusal in words."""
    answer = post(engine.base_url + asked[0], asked[1])
    return answer.json if answer.status == 200 else f"{answer.status} {answer.body[:200]!r}"


def _differs(asked: Request, own: Parsed | str, true: Body | str) -> str | None:
    path, body = asked
    if isinstance(true, str):  # what the engine refuses need not be counted
        return None
    if isinstance(own, str):
        return f"refused here alone: {own}: {path} {str(body)[:200]}"
    told = used(true)[0]
    if sum(own.shape.prompts) == told and own.shape.exact:
        return None
    return f"{own.shape.prompts} ({own.count_method}) is not {told}: {path} {str(body)[:300]}"


def test_counts_are_the_engines(engine: Engine) -> None:
    asked = [(path, limited(path, body, 1)) for path, body in CORPUS]
    assert len(asked) >= 500
    with ThreadPoolExecutor(32) as pool:
        true = list(pool.map(lambda each: _ask(engine, each), asked))
    own = asyncio.run(_read_all(engine, asked))
    wrong = [text for each in zip(asked, own, true, strict=True) if (text := _differs(*each))]
    assert not wrong, f"{len(wrong)} of {len(asked)}:\n" + "\n".join(wrong[:20])
    answered = [each for each in true if not isinstance(each, str)]
    refusals = Counter(each[:120] for each in true if isinstance(each, str))
    assert len(answered) >= 500, refusals
    methods = Counter(each.count_method for each in own if isinstance(each, Parsed))
    assert methods[CountMethod.LOCAL] > 0.95 * len(asked), methods


def _claim(engine: Engine, parsed: Parsed) -> Claim:
    limits = Limits(context=engine.max_model_len, block=engine.block_size)
    return claim(parsed.shape, limits)


@pytest.mark.parametrize("to_the_cap", [True, False])
def test_claims_cover_what_is_held(engine: Engine, to_the_cap: bool) -> None:
    """Of those that run to their cap at most a block for each sequence is claimed in vain."""
    dice = random.Random(11)
    fitting = [each for each in CORPUS if each[0] != RESPONSES]
    asked: list[Request] = []
    for path, body in dice.sample(fitting, 48):
        cap = dice.randint(2, 40)
        run = cap if to_the_cap else dice.randint(2, cap)
        forced = {"ignore_eos": True} if run == cap else forced_length(run)
        asked.append((path, limited(path, body, cap) | (forced if path != "/v1/messages" else {})))
    with ThreadPoolExecutor(8) as pool:
        true = list(pool.map(lambda each: _ask(engine, each), asked))
    seen = 0
    for each, parsed, answer in zip(asked, asyncio.run(_read_all(engine, asked)), true, strict=True):
        if isinstance(answer, str) or isinstance(parsed, str):
            continue
        charged, (prompt, output) = _claim(engine, parsed), used(answer)
        held = prompt * parsed.shape.n + output
        assert charged.tokens >= held, each
        if to_the_cap and output == sum(charged.outputs) * parsed.shape.n:
            seen += 1
            assert charged.tokens - held <= engine.block_size * charged.sequences, each
    assert seen >= (20 if to_the_cap else 0)
