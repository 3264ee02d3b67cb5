"""What the simulated engine holds for a request at any time is claimed: for all of a varied corpus.

Requests run one by one, in virtual time, as the engine itself reads them; the claim is what the proxy makes
of the same bytes.
"""

import json
import random
from typing import Any

import pytest

from kvctl.core.claim import Limits, claim
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.routes import Router
from kvctl.sim import text
from kvctl.sim.profiles import PROFILES
from kvctl.sim.requests import Generation, RefusedError
from kvctl.sim.requests import Reader as SimReader
from kvctl.sim.scheduler import EngineConfig, Scheduler, Sequence
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import EngineCounter
from tests.live.requests import CHAT, COMPLETIONS, Body, limited, requests

BLOCK = 16
CONFIG = EngineConfig(profile=PROFILES["tiny-cpu"], blocks=20_001, block_size=BLOCK, max_model_len=8192)


async def tokenize(body: bytes) -> tuple[int, bytes]:
    """The simulated engine's /tokenize, without the sockets."""
    asked = json.loads(body)
    if "messages" in asked:
        count = text.count_chat(asked)
    else:
        count = text.count(asked["prompt"]) + bool(asked.get("add_special_tokens", True))
    return 200, json.dumps({"count": count}).encode()


def most_held(generation: Generation) -> int:
    """KV tokens of all blocks that the engine holds for it at any time."""
    scheduler, places = Scheduler(CONFIG), range(len(generation.prompts))
    made = [place for place in places for _ in range(generation.n)]
    for number, (place, true) in enumerate(zip(made, generation.true_outputs, strict=True)):
        prompt, cap = generation.prompts[place], generation.max_outputs[place]
        scheduler.add(Sequence(id=str(number), prompt=prompt, max_output=cap, true_output=true))
    most = 0
    while (plan := scheduler.plan()) is not None:
        most = max(most, scheduler.pool.usable - scheduler.pool.free)
        scheduler.commit(plan)
    return most * BLOCK


@pytest.mark.parametrize("to_the_cap", [True, False])
async def test_all_that_is_held_is_claimed(to_the_cap: bool) -> None:
    reader = Reader(ChainCounter([EngineCounter(tokenize)]), VLLM(), context=lambda: CONFIG.max_model_len)
    router, engine, dice = Router(VLLM().routes), SimReader(CONFIG, "sim", 1), random.Random(3)
    seen = 0
    for path, plain in requests():
        if path not in (CHAT, COMPLETIONS):
            continue
        cap = dice.randint(1, 60)
        ends = cap if to_the_cap else dice.randint(1, cap)
        body: Body = limited(path, plain | {"model": "sim"}, cap) | {"sim_output_tokens": ends}
        held = _held(engine, body, chat=path == CHAT)
        if held is None:
            continue
        route = router.match("POST", path).route
        assert route is not None
        parsed = await reader.read(route, {"content-type": "application/json"}, json.dumps(body).encode())
        assert isinstance(parsed, Parsed), parsed
        charged = claim(parsed.shape, Limits(context=CONFIG.max_model_len, block=BLOCK))
        assert charged.tokens >= held, body
        if to_the_cap:
            assert charged.tokens - held <= BLOCK * charged.sequences, body
        seen += 1
    assert seen > 350


def _held(engine: SimReader, body: dict[str, Any], *, chat: bool) -> int | None:
    try:
        return most_held(engine.read(body, chat=chat))
    except RefusedError:
        return None
