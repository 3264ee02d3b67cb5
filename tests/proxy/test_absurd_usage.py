"""What an engine says of its tokens may be absurd: it is no count then, and costs nobody anything."""

import json

import pytest

from kvctl.core.outcomes import EndReason
from kvctl.proxy.conversations import finished
from kvctl.proxy.dialects import MOST_TOKENS
from kvctl.proxy.sniffer import MAX_JSON, JsonSniffer, StreamSniffer
from tests.proxy.harness import (
    CHAT,
    CHAT_STREAM,
    DONE,
    LAST,
    PLAIN,
    STREAM_HEAD,
    answering,
    chunk,
    event,
    plain,
    rig,
)

ABSURD = ["-1", "1000000000000000000", "1" + "0" * 400, str(MOST_TOKENS + 1)]


def usage(number: str) -> bytes:
    return f'{{"prompt_tokens":{number},"completion_tokens":{number}}}'.encode()


def with_usage(text: str, number: str) -> bytes:
    """An event as vLLM sends it with ``continuous_usage_stats``."""
    return event(text).replace(b"}\n\n", b',"usage":' + usage(number) + b"}\n\n")


@pytest.mark.parametrize("number", ABSURD, ids=["negative", "10^18", "10^400", "one too many"])
@pytest.mark.parametrize("body", [CHAT, CHAT[:-1] + b',"n":2}'], ids=["one", "two choices"])
async def test_a_plain_answer_ends_its_lease_uncounted(number: str, body: bytes) -> None:
    """An integer past all floats left the lease's end untold, and its tenant's tokens taken for good."""
    whole = json.dumps(json.loads(PLAIN)["usage"], separators=(",", ":")).encode()
    said = PLAIN.replace(whole, usage(number))
    assert said != PLAIN
    async with rig(answering(plain(said))) as it:
        assert (await it.post(body)).endswith(said)
        await it.quiet()
        assert it.reasons == [EndReason.FINISHED]
        assert it.ended[0].record.output_tokens == 0
        assert it.ended[0].record.prompt_tokens is None


@pytest.mark.parametrize("number", ABSURD, ids=["negative", "10^18", "10^400", "one too many"])
async def test_a_stream_counts_by_its_events(number: str) -> None:
    events = [event("a"), event("b"), with_usage("c", number), event("", "stop")]
    last = b'data: {"choices":[],"usage":' + usage(number) + b"}\n\n"
    stream = STREAM_HEAD + b"".join(map(chunk, [*events, last, DONE])) + LAST
    async with rig(answering(stream)) as it:
        assert (await it.post(CHAT_STREAM)).endswith(LAST)
        await it.quiet()
        record = it.ended[0].record
        assert (record.reason, record.output_tokens, record.prompt_tokens) == (EndReason.FINISHED, 4, None)
        status = it.gate.status(0.0)
        assert status.held_tokens == 0
        assert status.forecast_peak_tokens == 0


@pytest.mark.parametrize("number", [*ABSURD, "true", '"7"', "1.5", "[]", "{}", "NaN"])
@pytest.mark.parametrize(
    "form",
    [
        '{{"meta_info":{{"completion_tokens":{0},"prompt_tokens":{0}}},"index":0}}',
        '{{"token":{{"id":1}},"details":{{"generated_tokens":{0},"input_length":{0}}}}}',
        '{{"content":"","stop":true,"tokens_predicted":{0},"tokens_evaluated":{0}}}',
        '{{"type":"message_delta","delta":{{}},"usage":{{"output_tokens":{0},"input_tokens":{0}}}}}',
        '{{"type":"response.completed","response":{{"usage":{{"output_tokens":{0}}}}}}}',
        '{{"choices":[{{"index":0,"delta":{{"content":"a"}}}}],"usage":{{"completion_tokens":{0}}}}}',
    ],
    ids=["sglang", "tgi", "llama.cpp", "anthropic", "responses", "openai"],
)
def test_no_format_lets_it_into_the_books(form: str, number: str) -> None:
    sniffer = StreamSniffer()
    sniffer.feed(f"data: {form.format(number)}\n\n".encode())
    sniffer.end()
    assert sniffer.found.tokens <= 1
    assert (sniffer.found.output_tokens or 0) <= 1
    assert sniffer.found.prompt_tokens in (None, 0)


def test_the_tail_of_a_large_answer_is_searched_in_no_time() -> None:
    """Seven thousand beginnings without an end took five minutes of the event loop."""
    sniffer = JsonSniffer()
    sniffer.feed(b" " * MAX_JSON + b'"usage":{' * (MAX_JSON // 9))
    sniffer.end()
    assert sniffer.found.output_tokens is None


def test_the_last_usage_of_a_large_answer_counts() -> None:
    sniffer = JsonSniffer()
    sniffer.feed(b'{"a":"' + b"x" * MAX_JSON + b'","usage":{"completion_tokens":7,"details":{"x":{}}},"z":')
    sniffer.feed(b'[{"usage":{"completion_tokens":"no"}}]}')
    sniffer.end()
    assert sniffer.found.output_tokens == 7


@pytest.mark.parametrize(
    "change",
    [
        {"usage": {"input_tokens": 10**18, "output_tokens": 1}},
        {"usage": {"input_tokens": -5, "output_tokens": 1}},
        {"id": "r" * 1000},
        {"output": [{"type": "message", "content": 5}]},
        {"output": [{"type": "message", "content": {"text": "a"}}]},
    ],
)
def test_a_conversation_is_kept_of_plausible_answers_alone(change: dict[str, object]) -> None:
    answer = {
        "id": "resp_1",
        "status": "completed",
        "usage": {"input_tokens": 3, "output_tokens": 1},
        "output": [{"type": "message", "content": [{"text": "a"}]}],
    }
    assert finished(answer) is not None
    assert finished({**answer, **change}) is None
