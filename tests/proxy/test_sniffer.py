"""Reading along: equal for every split, bounded, and right about each API's streams."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.proxy.sniffer import (
    MAX_EVENT,
    MAX_JSON,
    Findings,
    JsonSniffer,
    NoSniffer,
    Sniffer,
    StreamSniffer,
    sniffer_for,
)
from tests.effort import examples
from tests.proxy.harness import DONE, PLAIN, STREAM, USAGE_EVENT, event

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"no","code":503}}\n\n'
PIECES = [
    event("a"),
    event("日本🙂"),
    event("", "stop"),
    event("b", "length"),
    USAGE_EVENT,
    DONE,
    ROLE,
    ERROR,
    b": comment\n\n",
    b"\n",
    b"\n\n\n",
    b"event: x\nid: 1\nretry: 5\n",
    b"data\n\n",
    b'data: {"choices":\ndata: [{"index":0,"text":"two lines"}]}\n\n',
    b'data:{"token":{"id":1},"generated_text":null}\n\n',
    b'data: {"text":"a","index":0,"meta_info":{"completion_tokens":4,"finish_reason":null}}\n\n',
    b'data: {"text":"ab","index":1,"meta_info":{"completion_tokens":9,"finish_reason":{"type":"stop"}}}\n\n',
    b'data: {"content":"a","stop":false,"tokens":[5,6]}\n\n',
    b'data: {"content":"","stop":true,"tokens_predicted":7,"stop_type":"limit"}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
    b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
    b"data: not json\n\n",
    b"data: " + b"x" * (MAX_EVENT - 7) + b"\n\n",
    b"data: " + b"x" * (MAX_EVENT - 6) + b"\n\n",
    b"data: " + b"x" * (MAX_EVENT - 5) + b"\n\n",
    b"x" * (MAX_EVENT + 10),
]


def read(sniffer: Sniffer, *parts: bytes) -> tuple[Findings, bool, int]:
    told = sum(sniffer.feed(part) for part in parts)
    border = sniffer.at_border
    sniffer.end()
    return sniffer.found, border, told


def line_ends(data: bytes, kind: bytes) -> bytes:
    return data.replace(b"\n", kind)


@settings(max_examples=examples(300), deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=6),
    kind=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.floats(0, 1), max_size=12),
    near=st.lists(st.integers(-3, 3), max_size=12),
)
def test_every_split_gives_the_same(
    pieces: list[bytes], kind: bytes, cuts: list[float], near: list[int]
) -> None:
    data = line_ends(b"".join(pieces), kind)
    ends, at = [], 0
    for piece in pieces:
        at += len(line_ends(piece, kind))
        ends += [at + shift for shift in near]
    places = sorted(
        {0, len(data), *(int(cut * len(data)) for cut in cuts), *(e for e in ends if 0 < e < len(data))}
    )
    parts = [data[a:b] for a, b in pairwise(places)]
    assert read(StreamSniffer(), *parts) == read(StreamSniffer(), data)


@pytest.mark.parametrize("kind", [b"\n", b"\r\n", b"\r"])
def test_byte_by_byte(kind: bytes) -> None:
    data = line_ends(ROLE + STREAM, kind)
    found, border, told = read(StreamSniffer(), *(data[n : n + 1] for n in range(len(data))))
    assert (found.tokens, told, border) == (3, 3, True)
    assert (found.output_tokens, found.prompt_tokens) == (3, 5)
    assert (found.finished, found.capped, found.error) == (True, False, False)


def test_tokens_of_several_choices_and_of_chunks_with_usage() -> None:
    """With usage on every chunk it counts the choice of that chunk; chunks may bring several tokens."""
    chunks = [(0, 2), (1, 1), (0, 5), (1, 4)]
    data = b"".join(
        b'data: {"choices":[{"index":%d,"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n'
        % pair
        for pair in chunks
    )
    assert read(StreamSniffer(), data)[0].tokens == 9
    ids = b'data: {"choices":[{"index":0,"text":"xyz","token_ids":[1,2,3]},{"index":1,"text":"q"}]}\n\n'
    assert read(StreamSniffer(), ids)[0].tokens == 4


def test_an_event_that_is_too_large_costs_no_memory_and_no_events() -> None:
    sniffer = StreamSniffer()
    for _ in range(100):
        sniffer.feed(b"data: " + b"x" * MAX_EVENT)
        assert len(sniffer._tail) <= MAX_EVENT
        assert not sniffer.at_border
    assert sniffer.feed(b"\n\n" + event("a")) == 2
    assert sniffer.at_border


@pytest.mark.parametrize(
    ("data", "border"),
    [
        (b"", True),
        (event("a"), True),
        (event("a")[:-1], False),
        (event("a") + b"\n", True),
        (b"data: x", False),
        (b": hi\n\n", True),
    ],
)
def test_borders(data: bytes, border: bool) -> None:
    assert read(StreamSniffer(), data)[1] is border


def typed(*events: dict[str, object]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), json.dumps(e).encode()) for e in events
    )


def test_anthropic_stream() -> None:
    data = typed(
        {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )
    found = read(StreamSniffer(), data)[0]
    assert found == Findings(2, 2, 7, finished=True, capped=True, recognised=True)


def test_responses_stream() -> None:
    data = typed(
        {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
        {"type": "response.output_text.delta", "delta": "a"},
        {
            "type": "response.completed",
            "response": {"status": "completed", "usage": {"input_tokens": 4, "output_tokens": 1}},
        },
    )
    assert read(StreamSniffer(), data)[0] == Findings(1, 1, 4, finished=True, recognised=True)
    failed = typed({"type": "response.failed", "response": {"status": "failed"}})
    assert read(StreamSniffer(), failed)[0].error


def test_tgi_stream() -> None:
    data = (
        b'data:{"token":{"id":1,"text":"a"},"generated_text":null,"details":null}\n\n'
        b'data:{"token":{"id":2,"text":"b"},"generated_text":"ab",'
        b'"details":{"finish_reason":"length","generated_tokens":2}}\n\n'
    )
    assert read(StreamSniffer(), data)[0] == Findings(2, 2, finished=True, capped=True, recognised=True)


def test_anthropic_takes_the_cache_out_of_its_input() -> None:
    usage = {"input_tokens": 7, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 3}
    data = typed({"type": "message_start", "message": {"usage": usage | {"output_tokens": 1}}})
    found = read(StreamSniffer(), data)[0]
    assert (found.prompt_tokens, found.output_tokens) == (110, None)


def test_anthropic_stream_that_ends_without_a_reason() -> None:
    found = read(StreamSniffer(), typed({"type": "content_block_delta"}, {"type": "message_stop"}))[0]
    assert (found.tokens, found.finished) == (1, True)


def test_sglang_stream_is_cumulative() -> None:
    """Each event tells all tokens of its choice so far; several choices share a stream."""
    events = [
        (0, 1, "null"),
        (1, 2, "null"),
        (0, 5, '{"type":"stop"}'),
        (1, 4, '{"type":"length","length":4}'),
    ]
    data = b"".join(
        b'data: {"text":"x","index":%d,"meta_info":'
        b'{"prompt_tokens":9,"completion_tokens":%d,"finish_reason":%b}}\n\n'
        % (index, tokens, reason.encode())
        for index, tokens, reason in events
    )
    assert read(StreamSniffer(), data, DONE)[0] == Findings(9, 9, 9, True, True, recognised=True)


def test_llamacpp_stream() -> None:
    data = (
        b'data: {"index":0,"content":"a","tokens":[],"stop":false,"id_slot":0}\n\n'
        b'data: {"index":0,"content":"b","tokens":[7],"stop":false}\n\n'
        b'data: {"content":"","stop":true,"stop_type":"limit","tokens_predicted":2,"tokens_evaluated":6}\n\n'
    )
    assert read(StreamSniffer(), data)[0] == Findings(2, 2, 6, True, True, recognised=True)


def test_generate_stream_of_ids() -> None:
    """vLLM's ids in, ids out: as many tokens as ids, and usage on every chunk where it is asked for."""
    data = (
        b'data: {"request_id":"r","choices":[{"index":0,"token_ids":[5,6]}]}\n\n'
        b'data: {"request_id":"r","choices":[{"index":0,"token_ids":[7],"finish_reason":"length"}]}\n\n'
    )
    found = read(StreamSniffer(), data, DONE)[0]
    assert (found.tokens, found.output_tokens, found.capped, found.finished) == (3, 3, True, True)


def test_a_piece_without_ids_leaves_the_total_open() -> None:
    """Ids are a total only where every piece of the answer has them."""
    data = (
        b'data: {"choices":[{"index":0,"text":"a","token_ids":[5,6]}]}\n\n'
        b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n'
    )
    found = read(StreamSniffer(), data, DONE)[0]
    assert (found.tokens, found.output_tokens) == (3, None)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (b'{"prompt_tokens":-1,"completion_tokens":-5}', (None, None)),
        (b'{"prompt_tokens":null}', (None, None)),
        (b'{"prompt_tokens":1e99}', (None, None)),
        (b'{"prompt_tokens":3,"completion_tokens":0}', (3, 0)),
    ],
)
def test_unknown_is_not_zero(usage: bytes, expected: tuple[int | None, int | None]) -> None:
    found = read(StreamSniffer(), b'data: {"choices":[],"usage":' + usage + b"}\n\n")[0]
    assert (found.prompt_tokens, found.output_tokens) == expected


@pytest.mark.parametrize("padding", [0, MAX_JSON - 100, MAX_JSON, 3 * MAX_JSON])
@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_plain_answers_of_any_size(padding: int, size: int) -> None:
    """Long ones are read from their end; what looks like usage inside a string is none."""
    trap = r"\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":9}"
    answer = PLAIN.replace(b'"content":"hi"', b'"content":"%b%b"' % (trap.encode(), b"x" * padding))
    parts = [answer[n : n + size] for n in range(0, len(answer), size)]
    sniffer = JsonSniffer()
    found = read(sniffer, *parts)[0]
    assert (found.prompt_tokens, found.output_tokens) == (5, 3)
    assert (found.finished, found.capped) == (True, False)
    assert len(sniffer._kept) <= 2 * MAX_JSON


def test_plain_answers_of_other_apis() -> None:
    anthropic = b'{"type":"message","stop_reason":"max_tokens","usage":{"input_tokens":6,"output_tokens":3}}'
    assert read(JsonSniffer(), anthropic)[0] == Findings(0, 3, 6, finished=True, capped=True, recognised=True)
    responses = b'{"object":"response","status":"incomplete","usage":{"input_tokens":6,"output_tokens":16}}'
    assert read(JsonSniffer(), responses)[0].capped


META = b'{"text":"x","meta_info":{"prompt_tokens":6,"completion_tokens":3,"finish_reason":{"type":"length"}}}'
LLAMA = b'{"content":"x","stop":true,"tokens_predicted":3,"tokens_evaluated":6,"stop_type":"limit"}'
TGI = (
    b'{"generated_text":"x","details":{"finish_reason":"length","generated_tokens":3,'
    b'"prefill":[{"id":1},{"id":2},{"id":3},{"id":4},{"id":5},{"id":6}]}}'
)


@pytest.mark.parametrize("answer", [META, LLAMA, TGI], ids=["sglang", "llama.cpp", "tgi"])
def test_plain_answers_of_the_native_routes(answer: bytes) -> None:
    one = read(JsonSniffer(), answer)[0]
    assert one == Findings(0, 3, 6, finished=True, capped=True, recognised=True)
    several = read(JsonSniffer(), b"[" + answer + b"," + answer + b"]")[0]
    assert (several.output_tokens, several.capped) == (6, True)


@pytest.mark.parametrize("answer", [META, LLAMA], ids=["sglang", "llama.cpp"])
def test_long_native_answers_are_read_from_their_end(answer: bytes) -> None:
    long = answer.replace(b'"x"', b'"' + b"x" * 2 * MAX_JSON + b'"')
    found = read(JsonSniffer(), long)[0]
    assert (found.prompt_tokens, found.output_tokens, found.capped) == (6, 3, True)


@pytest.mark.parametrize(
    ("kind", "encoding", "sort"),
    [
        (b"text/event-stream; charset=utf-8", b"", StreamSniffer),
        (b"Application/JSON", b"identity", JsonSniffer),
        (b"application/problem+json", b"", JsonSniffer),
        (b"application/json", b"gzip", NoSniffer),
        (b"", b"", NoSniffer),
    ],
)
def test_choice_of_reader(kind: bytes, encoding: bytes, sort: type) -> None:
    assert type(sniffer_for(kind, encoding)) is sort


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_garbage_is_survived(parts: list[bytes]) -> None:
    for sniffer in (StreamSniffer(), JsonSniffer(), NoSniffer()):
        read(sniffer, *parts)
        read(sniffer, *(b"data: " + part + b"\n\n" for part in parts))
