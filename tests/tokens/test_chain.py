import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.tokens.base import Counter, CountMethod
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import Ask
from kvctl.tokens.files import load_files
from kvctl.tokens.load import load_counter
from kvctl.tokens.local import LocalCounter
from kvctl.tokens.source import Why
from tests.effort import examples
from tests.tokens.slow import Slow
from tests.tokens.tiny import CHATML, write

USER = {"role": "user", "content": "hi"}
STRICT = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def local(folder: Path) -> AsyncIterator[ChainCounter]:
    counter = load_counter(str(folder))
    yield counter
    await counter.close()


async def engine_says_42(body: bytes) -> tuple[int, bytes]:
    assert body
    return 200, b'{"count": 42}'


async def engine_is_down(body: bytes) -> tuple[int, bytes]:
    raise ConnectionRefusedError(len(body))


async def test_a_path_counts_locally(local: ChainCounter) -> None:
    count = await local.count_chat("m", {"messages": [USER]}, 50)
    assert (count.method, count.exact) == (CountMethod.LOCAL, True)
    assert not local.fallbacks
    counter: Counter = local  # it satisfies the interface
    assert (await counter.count_text("m", ["a", "a a"])).prompts == (2, 3)


async def test_the_engine_counts_what_the_template_refuses(tmp_path: Path) -> None:
    """A27: a strict template refuses two user turns; the engine is asked, and the fallback is counted."""
    counter = load_counter(str(write(tmp_path, {"chat_template": STRICT})), ask=engine_says_42)
    count = await counter.count_chat("m", {"messages": [USER, USER]}, 100)
    assert (count.prompts, count.method) == ((42,), CountMethod.ENGINE)
    assert counter.fallbacks == {(CountMethod.LOCAL, Why.TEMPLATE): 1}
    assert (await counter.count_chat("m", {"messages": [USER]}, 50)).method is CountMethod.LOCAL
    await counter.close()


async def test_without_an_engine_it_is_a_bound(tmp_path: Path) -> None:
    """A27: neither template nor engine can tell: an upper bound, marked as no proof."""
    counter = load_counter(str(write(tmp_path, {"chat_template": STRICT})), ask=engine_is_down)
    count = await counter.count_chat("m", {"messages": [USER, USER]}, 100)
    assert (count.method, count.exact) == (CountMethod.BOUND, False)
    assert set(counter.fallbacks) == {
        (CountMethod.LOCAL, Why.TEMPLATE),
        (CountMethod.ENGINE, Why.UNREACHABLE),
    }
    await counter.close()


async def test_what_took_too_long_here_is_not_asked_of_the_engine(folder: Path) -> None:
    counter = load_counter(str(folder), ask=engine_says_42, inline_bytes=0, workers=1, timeout_s=0.05)
    text = Slow("slow " * 200_000)
    count = await counter.count_text("m", text)
    assert count.method is CountMethod.BOUND
    assert count.prompts[0] >= 1_000_000
    text.go.set()
    await counter.close()


async def test_what_can_never_fit_is_proven_without_tokenising(folder: Path) -> None:
    counter = load_counter(str(folder), timeout_s=30)
    counter.know_context(lambda: 50)
    count = await counter.count_text("m", ["slow " * 200_000])
    assert count.exact
    assert count.prompts[0] > 50
    await counter.close()


@pytest.mark.parametrize(
    ("setting", "method"), [("engine", CountMethod.ENGINE), ("bound", CountMethod.BOUND)]
)
async def test_settings(setting: str, method: CountMethod) -> None:
    counter = load_counter(setting, ask=engine_says_42)
    assert counter.method is method
    assert (await counter.count_text("m", ["x"])).method is method
    assert counter.vocab_size is None


async def test_media_are_added_and_never_proof(local: ChainCounter) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    text = {"type": "text", "text": "hi"}
    plain = await local.count_chat("m", {"messages": [USER]}, 50)
    count = await local.count_chat("m", {"messages": [{"role": "user", "content": [text, image]}]}, 1_000_000)
    assert count.prompts == (plain.prompts[0] + 16_384,)
    assert not count.exact


def engine_like(folder: Path) -> Ask:
    """An engine that counts with the files in ``folder``."""
    source = LocalCounter(load_files(folder))

    async def ask(body: bytes) -> tuple[int, bytes]:
        data = json.loads(body)
        if "prompt" in data:
            (count,) = await source.text("m", [data["prompt"]], add_special_tokens=data["add_special_tokens"])
        else:
            count = await source.chat("m", data, len(body))
        return 200, json.dumps({"count": count}).encode()

    return ask


async def test_the_engines_own_tokenizer_is_confirmed(folder: Path) -> None:
    counter = load_counter(str(folder), ask=engine_like(folder))
    assert await counter.verify("m") == 0
    assert (counter.doubted, counter.method) == (False, CountMethod.LOCAL)
    await counter.close()


async def test_a_tokenizer_that_is_not_the_engines_is_not_used(folder: Path, tmp_path: Path) -> None:
    """A09: a tokenizer or template that counts other than the engine is found out and left."""
    other = write(tmp_path, {"chat_template": "Be kind. " + CHATML})
    counter = load_counter(str(other), ask=engine_like(folder))
    assert await counter.verify("m") == 3  # the template differs, the tokenizer does not
    assert (counter.doubted, counter.method) == (True, CountMethod.ENGINE)
    assert (await counter.count_chat("m", {"messages": [USER]}, 50)).method is CountMethod.ENGINE
    await counter.close()


async def test_doubt_ends_when_the_counts_agree_again(folder: Path, tmp_path: Path) -> None:
    asked = [engine_like(write(tmp_path, {"chat_template": "x"})), engine_like(folder)]
    counter = load_counter(str(folder), ask=lambda body: asked[0](body))  # noqa: PLW0108 - which one is decided late
    assert await counter.verify("m")
    asked.pop(0)
    assert await counter.verify("m") == 0
    assert counter.method is CountMethod.LOCAL
    await counter.close()


async def test_an_engine_that_does_not_answer_proves_nothing(folder: Path) -> None:
    counter = load_counter(str(folder), ask=engine_is_down)
    assert await counter.verify("m") is None
    assert counter.method is CountMethod.LOCAL
    assert await load_counter("engine", ask=engine_says_42).verify("m") is None
    assert await load_counter("bound").verify("m") is None
    await counter.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | JSON, "content": JSON},
    optional={"tool_calls": JSON, "name": JSON, "reasoning_content": JSON, "tool_call_id": JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional={
        "tools": JSON,
        "documents": JSON,
        "chat_template_kwargs": JSON,
        "reasoning_effort": JSON,
        "add_generation_prompt": JSON,
        "continue_final_message": JSON,
        "add_special_tokens": JSON,
        "chat_template": JSON,
    },
)


@given(body=BODY)
@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
async def test_no_shape_of_a_chat_makes_it_raise(local: ChainCounter, body: dict[str, Any]) -> None:
    """A26: null, lists and nonsense in any place of a chat still give a count."""
    count = await local.count_chat("m", body, 100)
    assert len(count.prompts) == 1
    assert count.prompts[0] >= 0
