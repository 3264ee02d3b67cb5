"""Conversations that only the engine has are counted where both of their halves passed by."""

import asyncio
import json
from itertools import count

import pytest

from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.conversations import MOST_BYTES, AnswerTail, Conversations, finished
from kvctl.tokens.chain import ChainCounter
from tests.proxy.harness import STREAM_HEAD, Rig, Script, Wire, chunk, eventually, plain, rig
from tests.proxy.reading import JSON, Json, route_of

PATH = "/v1/responses"
RESPONSES = route_of(VLLM(), PATH)
FIRST: Json = {"model": "m", "instructions": "be brief", "input": "how warm is it ?", "max_output_tokens": 8}
NEXT: Json = {"model": "m", "input": "and tomorrow ?", "max_output_tokens": 8}


def answered(name: str, tokens: int, *texts: str, **more: object) -> Json:
    """What vLLM answers: reasoning, then messages."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm hm"}]}
    parts = [{"type": "output_text", "text": text} for text in texts]
    usage = {"input_tokens": tokens, "output_tokens": 7, "total_tokens": tokens + 7}
    output = [thought, {"type": "message", "role": "assistant", "content": parts}]
    return {"id": name, "object": "response", "status": "completed", "output": output, "usage": usage} | more


async def read(reader: Reader, body: Json) -> Parsed:
    parsed = await reader.read(RESPONSES, JSON, json.dumps(body).encode())
    assert isinstance(parsed, Parsed)
    return parsed


async def told(reader: Reader, parsed: Parsed, *texts: str, name: str = "resp_1", off: int = 0) -> None:
    """The engine answers what was read, with ``off`` tokens more than were counted."""
    answer = answered(name, parsed.shape.prompts[0] + off, *texts)
    await reader.remember(parsed, json.dumps(answer).encode())


async def test_a_kept_conversation_is_counted_like_one_in_the_body(tiny_reader: Reader) -> None:
    """Without its instructions, and with the texts of its answer; reasoning falls away."""
    await told(tiny_reader, await read(tiny_reader, FIRST), "21 degrees", "or 22")
    follow = await read(tiny_reader, NEXT | {"previous_response_id": "resp_1", "instructions": "in German"})
    spelled = [
        {"role": "user", "content": "how warm is it ?"},
        {"role": "assistant", "content": "21 degrees"},
        {"role": "user", "content": "and tomorrow ?"},
    ]
    whole = await read(tiny_reader, NEXT | {"input": spelled, "instructions": "in German"})
    one = await read(tiny_reader, NEXT | {"input": [spelled[0], spelled[1] | {"content": "or 22"}]})
    user = await read(tiny_reader, NEXT | {"input": [spelled[0]]})
    assert follow.shape.exact
    assert follow.shape.prompts[0] == whole.shape.prompts[0] + one.shape.prompts[0] - user.shape.prompts[0]


async def test_turn_after_turn(tiny_reader: Reader) -> None:
    asked, messages = await read(tiny_reader, FIRST), [{"role": "user", "content": "how warm is it ?"}]
    for number in range(5):
        await told(tiny_reader, asked, f"answer {number}", name=f"resp_{number}")
        asked = await read(tiny_reader, NEXT | {"previous_response_id": f"resp_{number}"})
        messages += [
            {"role": "assistant", "content": f"answer {number}"},
            {"role": "user", "content": NEXT["input"]},
        ]
        whole = await read(tiny_reader, NEXT | {"input": messages})
        assert (asked.shape.prompts, asked.shape.exact) == (whole.shape.prompts, True)


async def test_a_conversation_that_was_miscounted_bounds_what_follows(tiny_reader: Reader) -> None:
    """The engine made something else of it: its own figure, the text and the new input are the bound."""
    first = await read(tiny_reader, FIRST)
    await told(tiny_reader, first, "21 degrees", off=40)
    follow = await read(tiny_reader, NEXT | {"previous_response_id": "resp_1"})
    alone = await read(tiny_reader, NEXT)
    least = first.shape.prompts[0] + 40 + alone.shape.prompts[0]
    assert not follow.shape.exact
    assert least < follow.shape.prompts[0] < least + 100


async def test_text_is_counted_again(tiny_reader: Reader) -> None:
    """It may come to more tokens than it was generated with."""
    await told(tiny_reader, await read(tiny_reader, FIRST), "word " * 500, off=1)
    follow = await read(tiny_reader, NEXT | {"previous_response_id": "resp_1"})
    assert follow.shape.prompts[0] > 500


@pytest.mark.parametrize("more", [{"store": False}, {"truncation": "auto"}, {"truncation": None}])
async def test_what_the_engine_does_not_keep_whole_is_not_remembered(tiny_reader: Reader, more: Json) -> None:
    await told(tiny_reader, await read(tiny_reader, FIRST | more), "21")
    follow = await read(tiny_reader, NEXT | {"previous_response_id": "resp_1"})
    assert (follow.shape.prompts, follow.shape.exact) == ((8192,), False)


async def test_no_bound_is_beyond_the_context(tiny_reader: Reader) -> None:
    await told(tiny_reader, await read(tiny_reader, FIRST), "21", off=8000)
    follow = await read(tiny_reader, NEXT | {"previous_response_id": "resp_1", "input": "hello " * 500})
    assert (follow.shape.prompts, follow.shape.exact) == ((8192,), False)


async def test_an_odd_shape_after_a_known_conversation(tiny_reader: Reader) -> None:
    first = await read(tiny_reader, FIRST)
    await told(tiny_reader, first, "21")
    odd = NEXT | {"previous_response_id": "resp_1", "input": [{"type": "item_reference", "id": "x"}]}
    shape = (await read(tiny_reader, odd)).shape
    assert not shape.exact
    assert first.shape.prompts[0] < shape.prompts[0] < 8192


async def test_large_conversations_leave_their_tokens_alone(tiny_counter: ChainCounter) -> None:
    reader = Reader(tiny_counter, VLLM(), context=lambda: 10_000_000)
    first = await read(reader, FIRST | {"input": "hello " * (MOST_BYTES // 6)})
    await told(reader, first, "21")
    follow = await read(reader, NEXT | {"previous_response_id": "resp_1"})
    assert not follow.shape.exact
    assert follow.shape.prompts[0] > first.shape.prompts[0]


def test_bounds_of_what_is_kept() -> None:
    now = [0.0]
    kept = Conversations(lambda: now[0], most_bytes=250)
    message = {"role": "user", "content": "x"}
    for number in range(3):
        kept.keep(f"resp_{number}", tokens=number, messages=(message,), weight=100)
    kept.keep("resp_2", tokens=5, messages=(message,), weight=120)
    assert kept.bytes == 220
    known = [kept.of(f"resp_{number}") for number in range(3)]
    assert [past.messages is None for past in known if past] == [True, False, False]
    now[0] = 3000.0
    kept.keep("resp_3", tokens=9)
    now[0] = 3700.0
    assert kept.of("resp_1") is None
    kept.keep("resp_4", tokens=9)
    assert (len(kept), kept.bytes) == (2, 0)
    odd: list[object] = [None, 7, ["resp_3"], {}]
    assert [kept.of(name) for name in odd] == [None] * 4


STREAMED = b"".join(
    f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    for event in (
        {"type": "response.created", "response": {"id": "resp_9", "status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "21"},
        {"type": "response.completed", "response": answered("resp_9", 5, "21")},
    )
)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_the_last_event_is_found_however_the_bytes_are_split(end: bytes) -> None:
    data = STREAMED + end
    for size in (1, 2, 3, 7, 64, len(data)):
        tail = AnswerTail(stream=True)
        for start in range(0, len(data), size):
            tail.feed(data[start : start + size])
        found = finished(json.loads(tail.document()))
        assert found is not None
        assert (found.response_id, found.prompt_tokens, found.texts) == ("resp_9", 5, ("21",))


def test_large_answers_are_let_go() -> None:
    for stream in (False, True):
        tail = AnswerTail(stream=stream)
        for _ in range(3):
            tail.feed(b"x" * 500_000)
        assert tail.document() == b""
    tail.feed(b"\n\n" + STREAMED)
    assert finished(json.loads(tail.document())) is not None


ODD: list[Json] = [
    {},
    {"id": 7},
    answered("resp_1", 5, "a", status="failed"),
    answered("resp_1", 5, "a", usage=None),
    answered("resp_1", 5, "a", usage={"input_tokens": "5", "output_tokens": 1}),
    answered("resp_1", 5, "a", output="text"),
    answered("resp_1", 5, "a", output=[{"type": "message", "content": [{"type": "refusal"}]}]),
    answered("resp_1", 5, "a", output=[{"type": "message", "content": "text"}]),
    {"response": [answered("resp_1", 5, "a")]},
]


@pytest.mark.parametrize("document", ODD)
async def test_answers_of_another_form_are_not_remembered(tiny_reader: Reader, document: Json) -> None:
    assert finished(document) is None
    await tiny_reader.remember(await read(tiny_reader, FIRST), json.dumps(document).encode())
    await tiny_reader.remember(await read(tiny_reader, FIRST), b"\xff{")


# --- through the whole proxy ------------------------------------------------------------------------


def keeping(hold: asyncio.Event) -> Script:
    """An engine with a store: counts words, answers "resp_N", and holds its answers until told."""

    stored, numbers = {"resp_0": 3}, count(1)

    async def script(wire: Wire) -> None:
        for number in numbers:
            body = json.loads((await wire.request()).body)
            await hold.wait()
            words = len(f"{body.get('instructions', '')} {body['input']}".split())
            words += stored.get(body.get("previous_response_id"), 0)
            stored[f"resp_{number}"] = words + 3
            answer = answered(f"resp_{number}", words, "one two three")
            if not body.get("stream"):
                await wire.send(plain(json.dumps(answer).encode()))
                continue
            event = {"type": "response.completed", "response": answer}
            await wire.send(STREAM_HEAD + chunk(f"data: {json.dumps(event)}\n\n".encode()) + b"0\r\n\r\n")

    return script


async def claimed(built: Rig, hold: asyncio.Event, body: Json) -> int:
    """What the gate holds for a request while the engine works on it."""
    hold.clear()
    task = asyncio.create_task(built.post(json.dumps(body).encode(), PATH))
    await eventually(lambda: len(built.gate.ledger) == 1)
    tokens = built.gate.ledger.claimed_tokens
    hold.set()
    assert b"200 OK" in await task
    return tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_follow_up_claims_what_it_comes_to(stream: bool) -> None:
    """Bounded by the context where its beginning is not known, then by what that came to; else exact."""
    hold = asyncio.Event()
    async with rig(keeping(hold)) as built:
        body = NEXT | {"stream": stream, "max_output_tokens": 16}
        assert await claimed(built, hold, body | {"previous_response_id": "resp_0"}) >= 8192
        assert await claimed(built, hold, body | {"previous_response_id": "resp_1"}) <= 128
        assert await claimed(built, hold, body) <= 32
        assert await claimed(built, hold, body | {"previous_response_id": "resp_3"}) <= 32
