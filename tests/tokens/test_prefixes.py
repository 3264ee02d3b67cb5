"""How prompts begin, by the local tokenizer, the engine, and plain ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.tokens.begin import BORDER, RUN, Tokens, as_cached, prefix_of, prefixes_of
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import EngineCounter
from kvctl.tokens.files import load_files
from kvctl.tokens.local import LocalCounter
from tests.effort import examples
from tests.tokens.tiny import write

SYSTEM = "You are helpful, brief, and never wrong about the weather in Cologne. " * 60


@given(
    st.lists(st.integers(0, 3), max_size=600),
    st.lists(st.integers(0, 3), max_size=600),
    st.sampled_from([0, BORDER - 1, BORDER, 3 * BORDER + 5, RUN, RUN + 1]),
)
@settings(max_examples=examples(60), deadline=None)
def test_equal_hashes_are_equal_beginnings(one: list[int], other: list[int], common: int) -> None:
    beginning = [7] * common
    mine, theirs = prefix_of(beginning + one), prefix_of(beginning + other)
    assert [tokens for tokens, _ in mine] == list(range(BORDER, common + len(one), BORDER))
    for (tokens, known), (_, seen) in zip(mine, theirs, strict=False):
        assert (known == seen) == ((beginning + one)[:tokens] == (beginning + other)[:tokens])


@pytest.mark.parametrize("ids", [[-1] * 300, [1 << 70] * 300, ["a"] * 300, [1.5] * 300])
def test_odd_ids_begin_like_nothing(ids: list[Any]) -> None:
    assert prefix_of(ids) == ()


def test_one_prefix_a_prompt_or_none_at_all() -> None:
    some = prefix_of(list(range(200)))
    assert prefixes_of((Tokens(200, some), Tokens(3))) == (some, ())
    assert prefixes_of((Tokens(200, some), 3)) == ()
    assert Tokens(200, some) == 200


PLAIN = (prefix_of(list(range(300))),)


def test_a_salt_keeps_callers_apart() -> None:
    mine, again = as_cached(PLAIN, {"cache_salt": "a"}), as_cached(PLAIN, {"cache_salt": "a"})
    theirs = as_cached(PLAIN, {"cache_salt": "b"})
    assert mine == again
    assert len({mine, theirs, PLAIN}) == 3
    assert [tokens for tokens, _ in mine[0]] == [tokens for tokens, _ in PLAIN[0]]


@pytest.mark.parametrize(
    "body", [{"prompt_logprobs": 0}, {"prompt_logprobs": 5}, {"echo": True, "logprobs": 1}]
)
def test_what_the_engine_computes_anew_shares_nothing(body: dict[str, Any]) -> None:
    assert as_cached(PLAIN, body) == ()
    assert as_cached(PLAIN, {"echo": True, "logprobs": None, "prompt_logprobs": None}) == PLAIN


@pytest.fixture
def local(tmp_path: Path) -> LocalCounter:
    return LocalCounter(load_files(write(tmp_path)), inline_bytes=100)


async def test_chats_with_one_system_prompt_begin_alike(local: LocalCounter) -> None:
    counter = ChainCounter([local])

    async def count(system: str, user: str) -> tuple[int, tuple[tuple[int, int], ...]]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        counted = await counter.count_chat("m", {"messages": messages}, 5000)
        return counted.prompts[0], counted.prefixes[0] if counted.prefixes else ()

    assert (await count(SYSTEM, "a"))[1] == ()
    counter.know_sharing(lambda: True)
    (tokens, one), (_, two), (_, other) = [
        await count(*texts) for texts in ((SYSTEM, "a"), (SYSTEM, "bb " * 99), ("No. " + SYSTEM, "a"))
    ]
    alike = [mine for mine, theirs in zip(one, two, strict=False) if mine == theirs]
    assert alike[-1][0] > tokens - BORDER - 60
    assert not set(one) & set(other)
    await counter.close()


async def test_plain_prompts_too(local: LocalCounter) -> None:
    local.begins = lambda: True
    one, two = await local.text("m", [SYSTEM + "a", SYSTEM + "b"], add_special_tokens=False)
    assert isinstance(one, Tokens)
    assert isinstance(two, Tokens)
    assert one.prefix
    assert one.prefix[:-1] == two.prefix[:-1]
    await local.close()


async def test_the_engine_tells_its_tokens() -> None:
    async def ask(body: bytes) -> tuple[int, bytes]:
        ids = [*range(400), len(json.loads(body)["prompt"])]
        return 200, json.dumps({"count": len(ids), "tokens": ids}).encode()

    counter = ChainCounter([EngineCounter(ask)])
    assert (await counter.count_text("m", ["x"])).prefixes == ()
    counter.know_sharing(lambda: True)
    counted = await counter.count_text("m", ["xx", "xxx"])
    assert counted.prompts == (401, 401)
    assert counted.prefixes[0] == counted.prefixes[1] == prefix_of(list(range(401)))
