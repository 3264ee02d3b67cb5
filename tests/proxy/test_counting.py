"""The model's own tokenizer behind a real proxy: what is counted, and whom counting must not hold up."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.outcomes import Policy, RejectReason
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.tokens.base import Count, CountMethod
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.load import load_counter
from kvctl.tokens.local import LocalCounter
from tests.proxy.harness import (
    CHAT_STREAM,
    LAST,
    PATIENCE,
    PLAIN,
    STREAM_HEAD,
    Request,
    Rig,
    Script,
    Wire,
    WordCounter,
    answering,
    chunk,
    event,
    eventually,
    get,
    plain,
    post,
    rig,
)
from tests.tokens.tiny import write

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' and not loop.last or m.tool_calls and m.content %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def counter(folder: Path) -> AsyncIterator[ChainCounter]:
    made = load_counter(str(folder), workers=1, timeout_s=60)
    yield made
    await made.close()


@pytest.fixture
def reader(counter: ChainCounter) -> Reader:
    return Reader(counter, VLLM(), vocab_size=counter.vocab_size)


def chat(content: Any = "hi", **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]} | more).encode()


def text(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | more).encode()


def holding(release: asyncio.Event, got: list[Request] | None = None) -> Script:
    """An engine that answers when it may."""

    async def script(wire: Wire) -> None:
        while True:
            request = await wire.request()
            if got is not None:
                got.append(request)
            await release.wait()
            await wire.send(plain(PLAIN))

    return script


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# --- what is counted --------------------------------------------------------------------------------


async def test_a01_requests_without_a_limit_share_a_small_pool(reader: Reader) -> None:
    """A01: five chats without a limit fit a pool of 20,000 at a context of 8,192; none is written in."""
    release, got = asyncio.Event(), list[Request]()
    words = "The quick brown fox jumps over the lazy dog. " * 8
    async with rig(holding(release, got), capacity=20_000, reader=reader) as it:
        chats = [asyncio.create_task(it.post(chat(words))) for _ in range(5)]
        await eventually(lambda: len(got) == 5)
        for lease in it.gate.ledger:
            assert lease.claim.outputs == (8192 - lease.claim.prompts[0],)
        texts = [asyncio.create_task(it.post(text(words), "/v1/completions")) for _ in range(5)]
        await eventually(lambda: len(got) == 10)
        assert [lease.claim.outputs for lease in it.gate.ledger][5:] == [(16,)] * 5
        release.set()
        assert {status(answer) for answer in await asyncio.gather(*chats, *texts)} == {200}
        assert {request.body for request in got} == {chat(words), text(words)}


async def test_a03_an_engine_that_does_not_clamp_has_its_own_say(reader: Reader) -> None:
    """A03: 12 + 8181 over a context of 8192 is admitted; an older engine's 400 is the answer."""
    body = b'{"error":{"message":"maximum context length is 8192","code":400}}'
    prompt = list(range(12))
    async with rig(answering(plain(body, "400 Bad Request")), reader=reader) as it:
        for limit in (8180, 8181, 8192):
            answer = await it.post(text(prompt, max_tokens=limit), "/v1/completions")
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(body)
        assert it.engine.accepted > 0
        own = await it.post(text(prompt, max_tokens=8193), "/v1/completions")
        assert own.startswith(b"HTTP/1.1 400 ")
        assert it.seen.records[-1].reject is RejectReason.CONTEXT


async def test_a06_the_context_limit_falls_where_the_engine_has_it(reader: Reader, folder: Path) -> None:
    """A06: with one BOS more a completion is over a context that the same text fits without it."""
    long = "hello " * 200
    counter = load_counter(str(folder))
    (with_bos,) = (await counter.count_text("m", [long])).prompts
    async with rig(answering(plain(PLAIN)), reader=reader, context=with_bos) as it:
        as_is = await it.post(text(long, add_special_tokens=False, max_tokens=1), "/v1/completions")
        over = await it.post(text(long, max_tokens=1), "/v1/completions")
        assert (status(as_is), status(over)) == (200, 400)
    await counter.close()


async def test_a09_thai_is_counted_by_the_models_own_tokenizer(reader: Reader, folder: Path) -> None:
    """A09: 4,000 characters of Thai: the tokenizer's own count; without one a bound that proves nothing."""
    thai = "กรุงเทพมหานครอมรรัตนโกสินทร์" * 143
    counter = load_counter(str(folder))
    (true,) = (await counter.count_text("m", [thai])).prompts
    await counter.close()
    async with rig(answering(plain(PLAIN)), reader=reader, context=true) as it:
        assert status(await it.post(text(thai, max_tokens=1), "/v1/completions")) == 400
    blind = Reader(load_counter("bound"), VLLM())
    async with rig(answering(plain(PLAIN)), reader=blind, context=true // 2) as it:
        assert status(await it.post(text(thai, max_tokens=1), "/v1/completions")) == 200
        assert it.seen.methods == [CountMethod.BOUND]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-186, 400), (-1, 400), (1.5, 400), (True, 200), ("100", 200), (1e308, 400), (2**63 - 1, 400),
     (None, 200)],
)  # fmt: skip
async def test_a16_no_limit_moves_the_budget(reader: Reader, value: Any, expected: int) -> None:
    """A16: whatever max_tokens is, a hundred times: the engine's verdict, no 5xx, the ledger as before."""
    async with rig(answering(plain(PLAIN)), reader=reader) as it:
        before = it.gate.status(0.0)
        client = await it.client()
        for _ in range(100):
            await client.send(post(chat(max_tokens=value)))
            head = await client.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await client.reader.readexactly(length)
            assert status(head) == expected
        after = it.gate.status(0.0)
        assert (after.budget_tokens, after.headroom_tokens) == (before.budget_tokens, before.headroom_tokens)
        client.close()


async def test_a28_agents_share_the_ledger_by_anthropics_api(reader: Reader) -> None:
    """A28: twenty agents, 20 kB of system blocks and 15 tools each: claims, and 429 in Anthropic's form."""
    release, got = asyncio.Event(), list[Request]()
    tools = [{"name": f"t{i}", "input_schema": {"properties": {"x": {"type": "string"}}}} for i in range(15)]
    system = [{"type": "text", "text": "word " * 500} for _ in range(8)]
    body = json.dumps(
        {"model": "m", "max_tokens": 8000, "system": system, "tools": tools, "messages": [USER]}
    ).encode()
    async with rig(
        holding(release, got), reader=reader, capacity=100_000, context=65_536, policy=Policy.STATIC
    ) as it:
        calls = [asyncio.create_task(it.post(body, "/v1/messages")) for _ in range(20)]
        await eventually(lambda: it.seen.admissions == 20)
        running = list(it.gate.ledger)
        claim = running[0].claim
        assert claim.outputs == (8000,)
        assert claim.prompts[0] > 4000
        assert len(running) == 95_000 // claim.tokens
        counted = asyncio.create_task(it.post(b'{"model":"m","messages":[]}', "/v1/messages/count_tokens"))
        await eventually(lambda: len(got) == len(running) + 1)
        assert len(it.gate.ledger) == len(running)
        release.set()
        assert status(await counted) == 200
        answers = await asyncio.gather(*calls)
    refused = [answer for answer in answers if status(answer) == 429]
    assert len(refused) == 20 - len(running)
    for answer in refused:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
        assert b"retry-after-ms:" in answer.lower()


@pytest.mark.parametrize("prompt", [[-1, 5, 7], [99_999_999], [[5], [99_999_999]]])
async def test_a20_ids_that_kill_an_engine_do_not_reach_it(reader: Reader, prompt: Any) -> None:
    """A20: ids outside the vocabulary are a 400 of kvctl's own."""
    async with rig(answering(plain(PLAIN)), reader=reader) as it:
        assert status(await it.post(text(prompt), "/v1/completions")) == 400
        assert it.engine.accepted == 0


CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NULL_CALL = CALL | {"function": {"name": "f", "arguments": "null"}}
ECHOED: list[Json] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "21"},
    {"role": "assistant", "content": [], "tool_calls": []},
    {"role": "assistant", "content": None, "tool_calls": [NULL_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": ""},
]  # fmt: skip


@pytest.mark.parametrize("verdict", ["200 OK", "400 Bad Request"])
async def test_a26_what_clients_echo_back_is_forwarded_as_it_is(reader: Reader, verdict: str) -> None:
    """A26: null and empty contents, no tool calls, arguments null: counted, forwarded, judged upstream."""
    got: list[bytes] = []

    async def script(wire: Wire) -> None:
        got.append((await wire.request()).body)
        await wire.send(plain(PLAIN, verdict))
        await wire.gone()

    body = json.dumps({"model": "m", "messages": ECHOED}, indent=1).encode()
    async with rig(script, reader=reader) as it:
        assert (await it.post(body)).startswith(f"HTTP/1.1 {verdict}".encode())
        assert got == [body]


MISTRAL: list[list[Json]] = [
    [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, USER],
    [USER, {"role": "assistant", "content": "and", "tool_calls": [CALL]}],
]  # fmt: skip


@pytest.mark.parametrize("messages", MISTRAL)
async def test_a27_a_template_that_refuses_is_not_the_clients_error(
    tmp_path: Path, messages: list[Json], caplog: pytest.LogCaptureFixture
) -> None:
    """A27: kvctl cannot render what the engine can: a bound, the engine's 200, a count of it, no log."""
    caplog.set_level(logging.DEBUG, logger="kvctl")
    counter = load_counter(str(write(tmp_path, {"chat_template": STRICT})))
    async with rig(answering(plain(PLAIN)), reader=Reader(counter, VLLM())) as it:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        assert status(await it.post(body)) == 200
        assert it.seen.methods == [CountMethod.BOUND]
        assert sum(counter.fallbacks.values()) == 1
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    await counter.close()


# --- whom counting must not hold up -----------------------------------------------------------------


async def streaming(wire: Wire) -> None:
    """Streams go on until the client leaves; anything else is answered at once."""
    while True:
        if b'"stream":true' not in (await wire.request()).body:
            await wire.send(plain(PLAIN))
            continue
        await wire.send(STREAM_HEAD)
        while True:
            await wire.send(chunk(event("a")))
            await asyncio.sleep(0.002)


def busy(counter: ChainCounter) -> threading.Event:
    """Its one thread is at something until the event is set."""
    assert isinstance(counter.own, LocalCounter)
    go = threading.Event()
    counter.own._pool.submit(go.wait, PATIENCE)
    return go


@pytest.mark.parametrize("run", ["x", "_"])
async def test_a12_e13_one_long_run_holds_up_nobody(counter: ChainCounter, reader: Reader, run: str) -> None:
    """A12, E13: while a million of one character are tokenised, streams flow and every probe is answered."""
    async with rig(streaming, reader=reader, context=100_000_000, capacity=1 << 30) as it:
        readers = [await it.client() for _ in range(20)]
        for wire in readers:
            await wire.send(post(CHAT_STREAM))
            await wire.reader.readuntil(event("a"))
        go = busy(counter)
        long = [asyncio.create_task(it.post(chat(n + run * 500_000, max_tokens=1))) for n in "12"]
        await eventually(lambda: counter.waiting == 2)
        go.set()
        probes = 0
        while counter.waiting:
            assert status(await it.talk(get("/healthz"))) == 200
            for wire in readers:
                await wire.reader.readuntil(event("a"))
            probes += 1
        assert probes >= 3
        assert {status(answer) for answer in await asyncio.gather(*long)} == {200}
        for wire in readers:
            wire.close()


async def test_a14_short_requests_pass_long_prompts(counter: ChainCounter, reader: Reader) -> None:
    """A14: ten long prompts wait for a thread, their number is a gauge; a hundred short ones pass them."""
    done: list[str] = []

    async def call(it: Rig, body: bytes, kind: str) -> None:
        assert status(await it.post(body)) == 200
        done.append(kind)

    prose = "Tous les êtres humains naissent libres, 1,234 of them. " * 3_000
    go = busy(counter)
    async with rig(answering(plain(PLAIN)), reader=reader, context=100_000_000, capacity=1 << 30) as it:
        texts = [prose.replace("libres", f"libres {n} fois") for n in range(10)]  # no part is in two of them
        long = [asyncio.create_task(call(it, chat(text, max_tokens=1), "long")) for text in texts]
        await eventually(lambda: counter.waiting == 10)
        await asyncio.gather(*(call(it, chat("hi", max_tokens=1), "short") for _ in range(100)))
        assert counter.waiting == 10
        assert "long" not in done
        go.set()
        await asyncio.gather(*long)
        assert done.count("short") == 100


class SlowCounter(WordCounter):
    """Takes its time, as a busy thread does, and then finds every prompt to be 10,000 tokens."""

    async def count_text(
        self, model: str, prompts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Count:
        return await super().count_text(model, prompts, add_special_tokens=add_special_tokens)

    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        del model, body, body_bytes
        await asyncio.sleep(0.02)
        return Count(prompts=(9_984,), method=CountMethod.LOCAL)


async def test_e06_nobody_passes_on_tokens_that_another_has_taken() -> None:
    """E06: 50,000 free, twenty of 10,000 counted side by side: four pass with the margin of 5 %."""
    release = asyncio.Event()
    slow = Reader(SlowCounter(), VLLM())
    async with rig(
        holding(release), capacity=50_000, policy=Policy.STATIC, context=32_768, reader=slow
    ) as it:
        calls = [asyncio.create_task(it.post(chat(max_tokens=16))) for _ in range(20)]
        await eventually(lambda: it.seen.admissions == 20)
        assert len(it.gate.ledger) == 4
        release.set()
        answers = [status(answer) for answer in await asyncio.gather(*calls)]
        assert (answers.count(200), answers.count(429)) == (4, 16)


async def test_a12_a_stream_ends_though_a_count_is_under_way(counter: ChainCounter, reader: Reader) -> None:
    """A12: a client that leaves while its long prompt is tokenised leaves nothing behind."""
    async with rig(answering(STREAM_HEAD + LAST), reader=reader, context=100_000_000) as it:
        wire = await it.client()
        await wire.send(post(chat("x" * 400_000)))
        await eventually(lambda: counter.waiting == 1)
        wire.close()
        await eventually(lambda: it.proxy.body_bytes == 0)
        await eventually(lambda: counter.waiting == 0)
        assert it.engine.accepted == 0
