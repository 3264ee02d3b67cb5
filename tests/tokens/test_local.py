import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.tokens.files import ModelFiles, load_files
from kvctl.tokens.local import LocalCounter
from kvctl.tokens.source import Uncountable, Why
from tests.steady import in_time
from tests.tokens.slow import Slow
from tests.tokens.tiny import BOS, IM_END, write


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return load_files(write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
async def counter(files: ModelFiles) -> AsyncIterator[LocalCounter]:
    counter = LocalCounter(files, inline_bytes=64, timeout_s=30)
    yield counter
    await counter.close()


def chat(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]} | more


async def test_completions_get_the_tokenizers_own_specials(counter: LocalCounter, files: ModelFiles) -> None:
    with_bos = await counter.text("m", ["hello there"], add_special_tokens=True)
    without = await counter.text("m", ["hello there"], add_special_tokens=False)
    assert with_bos == (len(files.tokenizer.encode("hello there")),)
    assert with_bos[0] == without[0] + 1


async def test_chat_and_its_prerendered_text_differ_by_the_bos(tmp_path: Path) -> None:
    """A06: rendered by the client and sent as a completion, the same text has one BOS more."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    counter = LocalCounter(load_files(write(tmp_path, {"chat_template": template})))
    in_chat = await counter.chat("m", chat("hello"), 60)
    (as_text,) = await counter.text("m", [BOS + "hello"], add_special_tokens=True)
    (as_is,) = await counter.text("m", [BOS + "hello"], add_special_tokens=False)
    assert (as_text, as_is) == (in_chat + 1, in_chat)
    await counter.close()


async def test_special_tokens_in_user_text_count_one_each(counter: LocalCounter) -> None:
    """A11: 5,000 pasted end-of-turn markers are 5,000 tokens, as the engine encodes them; no exception."""
    assert await counter.text("m", [IM_END * 5000], add_special_tokens=False) == (5000,)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4000])
async def test_inline_and_threaded_counts_agree(counter: LocalCounter, files: ModelFiles, size: int) -> None:
    text = ("The quick brown fox é " * 200)[:size]
    assert await counter.text("m", [text], add_special_tokens=True) == (len(files.tokenizer.encode(text)),)


async def test_chat_options_reach_the_count(counter: LocalCounter) -> None:
    """A08: the thinking switch, no generation prompt and tools change the count as they change the prompt."""
    plain = await counter.chat("m", chat(), 60)
    assert await counter.chat("m", chat(add_generation_prompt=False), 90) < plain
    assert await counter.chat("m", chat(chat_template_kwargs={"enable_thinking": False}), 100) > plain
    assert await counter.chat("m", chat(add_special_tokens=True), 100) == plain + 1
    tool = {"type": "function", "function": {"name": "f"}}
    assert await counter.chat("m", chat(tools=[tool]), 100) > plain


async def test_the_loop_runs_on_while_a_long_text_is_encoded(counter: LocalCounter) -> None:
    """A14: a megabyte of prose is encoded while the event loop goes on."""

    async def scenario() -> None:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        heart = asyncio.create_task(beat())
        text = f"some prose, {next(numbers)} words long; "  # another one each time: counts are kept
        await counter.text("m", [text * 30_000], add_special_tokens=True)
        heart.cancel()
        assert beats > 100

    numbers = itertools.count(1234)
    await in_time(scenario, 0.1)


@pytest.mark.parametrize("run", ["x", "_", " ", "é", "7"])
async def test_long_unbroken_runs(counter: LocalCounter, run: str) -> None:
    """A12: 200,000 times one character ends, with a count."""
    (count,) = await counter.text("m", [run * 200_000], add_special_tokens=False)
    assert 0 < count <= 400_000


async def test_past_the_deadline_there_is_no_count(files: ModelFiles) -> None:
    """A12: a text that takes too long is given up at the deadline."""
    counter, text = LocalCounter(files, inline_bytes=0, workers=1, timeout_s=0.05), Slow("a text")
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", text, add_special_tokens=True)
    assert raised.value.why is Why.TIMEOUT
    text.go.set()
    for _ in range(3000):
        if not counter.waiting:
            break
        await asyncio.sleep(0.01)
    assert counter.waiting == 0
    await counter.close()


async def test_a_text_far_beyond_the_context_is_not_tokenised(files: ModelFiles) -> None:
    counter = LocalCounter(files, inline_bytes=0, timeout_s=30)
    counter.context = lambda: 100
    most = 100 * files.longest_token
    (true,) = await counter.text("m", ["a b" * (most // 3)], add_special_tokens=False)
    assert true == len(files.tokenizer.encode("a b" * (most // 3), add_special_tokens=False))
    assert await counter.text("m", ["x" * (most + 1)], add_special_tokens=False) == (101,)
    assert await counter.chat("m", chat("x" * 100_000), 100_000) > 100
    await counter.close()


async def test_too_many_waiting_and_too_large(files: ModelFiles) -> None:
    """A14: the queue of long texts is bounded; who comes later gets the byte bound at once."""
    counter = LocalCounter(files, inline_bytes=0, workers=1, timeout_s=30, max_chars=2_000_000)
    long = ["slow " * 10_000]
    jobs = [asyncio.create_task(counter.text("m", long, add_special_tokens=True)) for _ in range(64)]
    done = await asyncio.gather(*jobs, return_exceptions=True)
    refused = [result for result in done if isinstance(result, Uncountable)]
    assert {result.why for result in refused} == {Why.BUSY}
    assert 0 < len(refused) < 64
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", ["x" * 2_000_001], add_special_tokens=True)
    assert raised.value.why is Why.TOO_LARGE
    await counter.close()


async def test_a_cancelled_request_leaves_nothing_behind(files: ModelFiles) -> None:
    counter = LocalCounter(files, inline_bytes=0, workers=1, timeout_s=30)
    job = asyncio.create_task(counter.text("m", ["slow " * 50_000], add_special_tokens=True))
    await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    (count,) = await counter.text("m", ["after"], add_special_tokens=True)
    assert count > 0
    await counter.close()


async def test_lone_surrogates_and_a_missing_template(files: ModelFiles, tmp_path: Path) -> None:
    counter = LocalCounter(files)
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", ["\ud800"], add_special_tokens=True)
    assert raised.value.why is Why.TEXT
    bare = LocalCounter(load_files(write(tmp_path, {"chat_template": None})))
    with pytest.raises(Uncountable) as raised:
        await bare.chat("m", chat(), 60)
    assert raised.value.why is Why.TEMPLATE
    await counter.close()
    await bare.close()


async def test_the_tool_template_is_for_requests_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "a b c d e f"}]
    counter = LocalCounter(load_files(write(tmp_path, {"chat_template": named})))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await counter.chat("m", chat(), 9) < await counter.chat("m", chat(tools=tools), 9)
    await counter.close()
