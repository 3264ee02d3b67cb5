"""The tokenizer in a process of its own: same counts, and a crash there is no crash here."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvctl.tokens.base import CountMethod
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.files import TokenizerError, load_files
from kvctl.tokens.isolated import IsolatedCounter
from kvctl.tokens.load import load_counter
from kvctl.tokens.local import LocalCounter
from kvctl.tokens.source import Uncountable, Why
from kvctl.tokens.worker import NICER
from tests.tokens.tiny import IM_END, write

CHAT = {"messages": [{"role": "user", "content": "The quick brown fox " * 40}], "tools": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny")


@pytest.fixture
async def isolated(folder: Path) -> AsyncIterator[IsolatedCounter]:
    counter = await asyncio.to_thread(IsolatedCounter, folder, timeout_s=30)
    yield counter
    await counter.close()


def child_of(counter: IsolatedCounter) -> int:
    assert counter._child is not None
    return counter._child.process.pid


async def test_it_counts_as_the_other_does(folder: Path, isolated: IsolatedCounter) -> None:
    local = LocalCounter(load_files(folder))
    assert isolated.vocab_size == local.vocab_size
    for begins in (False, True):
        isolated.begins = local.begins = lambda begins=begins: begins  # type: ignore[misc]
        for prompts in (["a"], ["hello there", "  x" * 300, IM_END * 50], []):
            mine = await isolated.text("m", prompts, add_special_tokens=True)
            theirs = await local.text("m", prompts, add_special_tokens=True)
            assert mine == theirs
            assert [getattr(c, "prefix", None) for c in mine] == [getattr(c, "prefix", None) for c in theirs]
        assert await isolated.chat("m", CHAT, 900) == await local.chat("m", CHAT, 900)
    assert isolated.tally.tokenised > 0
    assert isolated.keeps
    await local.close()


async def test_it_leaves_the_cores_to_the_streams(isolated: IsolatedCounter) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child_of(isolated)) == min(own + NICER, 19)


async def test_what_cannot_be_counted_says_why(isolated: IsolatedCounter) -> None:
    with pytest.raises(Uncountable) as raised:
        await isolated.text("m", ["\ud800"], add_special_tokens=True)
    assert raised.value.why is Why.TEXT
    with pytest.raises(Uncountable) as raised:
        await isolated.chat("m", {"messages": "none"}, 10)
    assert raised.value.why is Why.SHAPE
    with pytest.raises(Uncountable) as raised:
        await isolated.chat("m", {"messages": [{"role": "user", "content": object()}]}, 10)
    assert raised.value.why is Why.SHAPE


async def test_a_crash_is_bounded_told_and_mended(folder: Path) -> None:
    """A13: native code dies over a text. Who waited gets a bound; the next one is counted again."""
    counter = await asyncio.to_thread(load_counter, str(folder), timeout_s=30, isolated=True)
    told: list[str] = []
    own = counter.own
    assert isinstance(own, IsolatedCounter)
    own.lost = told.append
    assert (await counter.count_text("m", ["before"])).method is CountMethod.LOCAL
    os.kill(child_of(own), signal.SIGSTOP)
    waiting = asyncio.create_task(counter.count_text("m", ["a text"]))
    await asyncio.sleep(0.05)
    os.kill(child_of(own), signal.SIGSEGV)
    os.kill(child_of(own), signal.SIGCONT)
    count = await waiting
    assert count.method is CountMethod.BOUND
    assert counter.fallbacks == {(CountMethod.LOCAL, Why.CRASHED): 1}
    assert "ended (-11) over 1 counts" in told[0]
    for _ in range(600):
        if (await counter.count_text("m", ["after"])).method is CountMethod.LOCAL:
            break
        await asyncio.sleep(0.1)
    assert (await counter.count_text("m", ["after"])).method is CountMethod.LOCAL
    await counter.close()


async def test_a_count_that_never_ends_ends_the_process(folder: Path) -> None:
    counter = await asyncio.to_thread(IsolatedCounter, folder, timeout_s=30)
    await counter.text("m", ["warm"], add_special_tokens=True)
    counter._timeout_s = 0.05
    process = child_of(counter)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(Uncountable) as raised:
        await counter.text("m", ["slow"], add_special_tokens=True)
    assert raised.value.why is Why.TIMEOUT
    for _ in range(600):
        if counter.crashes:
            break
        await asyncio.sleep(0.05)
    assert counter.crashes == 1
    assert counter.waiting == 0
    await counter.close()


async def test_a_flood_is_refused_not_queued(folder: Path) -> None:
    counter = await asyncio.to_thread(IsolatedCounter, folder, timeout_s=30, workers=1, waiting_bytes=10_000)
    text = ["word " * 800]
    jobs = [counter.text("m", text, add_special_tokens=True) for _ in range(50)]
    done = await asyncio.gather(*jobs, return_exceptions=True)
    refused = [each for each in done if isinstance(each, Uncountable)]
    assert {each.why for each in refused} == {Why.BUSY}
    assert 0 < len(refused) < 50
    await counter.close()


async def test_files_that_cannot_be_read_are_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="there is no such file"):
        await asyncio.to_thread(IsolatedCounter, tmp_path / "nowhere")


async def test_the_way_of_loading_outlives_the_process(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    counter = await asyncio.to_thread(IsolatedCounter, folder, timeout_s=30)
    text = [" a b  c"]
    newer = await counter.text("m", text, add_special_tokens=False)
    assert await counter.other_way()
    older = await counter.text("m", text, add_special_tokens=False)
    assert newer != older
    os.kill(child_of(counter), signal.SIGKILL)
    for _ in range(600):
        try:
            again = await counter.text("m", text, add_special_tokens=False)
        except Uncountable:
            await asyncio.sleep(0.1)
        else:
            break
    assert again == older
    await counter.close()


async def test_a_chain_with_it_closes_with_it(folder: Path) -> None:
    chain = ChainCounter([await asyncio.to_thread(IsolatedCounter, folder)])
    await chain.count_text("m", ["x"])
    own = chain.own
    assert isinstance(own, IsolatedCounter)
    process = child_of(own)
    await chain.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
