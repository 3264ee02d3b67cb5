"""Events that are counted without being decoded: the same as if each had been."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from kvctl.proxy.alike import alike
from kvctl.proxy.dialects import Events
from kvctl.proxy.sniffer import StreamSniffer
from tests.effort import examples

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(choice: object, compact: bool = True, **more: object) -> bytes:
    """An event with one choice, without what ends it."""
    separators = (",", ":") if compact else (", ", ": ")
    document = {**HEAD, "choices": [choice], **more}
    return b"data: " + json.dumps(document, separators=separators, ensure_ascii=False).encode()


def piece(text: str, name: str = "content", index: int = 0) -> dict[str, object]:
    return {"index": index, "delta": {name: text}, "logprobs": None, "finish_reason": None}


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content"])
def test_a_piece_vouches_for_those_that_look_like_it(name: str, compact: bool) -> None:
    known = alike(chunk(piece(" a", name), compact))
    assert known is not None
    for text in ("", " b", "日本🙂", "é", ":", "{}[],", "content"):
        assert known.fits(chunk(piece(text, name), compact)), text


def test_completions_too() -> None:
    known = alike(chunk({"index": 3, "text": "a", "finish_reason": None}))
    assert known is not None
    assert known.index == 3
    assert known.fits(chunk({"index": 3, "text": "b", "finish_reason": None}))


BEHIND = b'"},"logprobs":null,"finish_reason":null}]}'


@pytest.mark.parametrize(
    "text",
    [
        b'"},"finish_reason":"stop"}],"x":[{"y":{"z":"',  # a whole other event
        b'a","role":"assistant',
        b"a\\",
        b"\\u0061",
        b"a\x00",
        b"a\nb",
        b"a\x7f",
        b"\xff",
        b"\xed\xa0\x80",  # half a surrogate pair
        b"\xe6\x97",
        b"x" * 70_000,
    ],
)
def test_a_text_that_may_be_more_than_a_text_is_decoded(text: bytes) -> None:
    known = alike(chunk(piece("a")))
    assert known is not None
    before = chunk(piece("a")).removesuffix(b"a" + BEHIND)
    assert known.fits(before + b"b" + BEHIND)
    assert not known.fits(before + text + BEHIND)


def test_texts_are_remembered_and_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found plain stays so, what was not never becomes it, and long ones are looked at each time."""
    monkeypatch.setattr("kvctl.proxy.alike._known", remembered := set[bytes]())
    known = alike(chunk(piece("a")))
    assert known is not None
    for _ in range(2):
        for number in range(5000):
            assert known.fits(chunk(piece(f"t{number}")))
            assert len(remembered) <= 4096
        for text in ('"', "\\", "\n", "\x7f"):
            assert not known.fits(chunk(piece("")).replace(b'""', b'"%b"' % text.encode()))
        assert known.fits(chunk(piece("z" * 60_000)))
    assert max(map(len, remembered)) <= 16
    assert all(text.isalnum() for text in remembered)


def test_what_only_overlaps_is_not_alike() -> None:
    known = alike(b'data: {"choices":[{"text":"a"}],"content":"b"}')
    assert known is not None
    assert not known.fits(b'data: {"choices":[{"text":"a"}],"content":"}')


@pytest.mark.parametrize(
    "event",
    [
        b"data: [DONE]",
        b'data: {"choices":[]}',
        chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}),
        chunk({"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}),
        chunk({"index": 0, "text": "a", "token_ids": [5]}),
        chunk(piece("a"), usage={"completion_tokens": 1}),
        chunk({"index": 0, "delta": {"tool_calls": [{"function": {"arguments": "a"}}]}}),
        b'data: {"choices":[{"text":"a\\"b"}]}',
        b'data: {"content":"a","stop":false}',
    ],
)
def test_other_events_vouch_for_nothing(event: bytes) -> None:
    assert alike(event) is None


TEXTS = st.sampled_from(["", " a", "tok", '"', "\\", '","role":"x', "日本", "é\u2028", "\n", "stop", "\x7f"])
CHOICES = st.builds(
    piece,
    TEXTS,
    st.sampled_from(["content", "content", "reasoning", "refusal"]),
    st.sampled_from([0, 0, 0, 1]),
) | st.sampled_from(
    [
        {"index": 0, "delta": {"role": "assistant", "content": ""}},
        {"index": 0, "delta": {"content": "a"}, "finish_reason": "length"},
        {"index": 0, "text": "ab", "token_ids": [1, 2]},
        {"index": 0, "text": "ab"},
    ]
)
EVENTS = st.builds(chunk, CHOICES, st.booleans()) | st.sampled_from(
    [
        chunk(piece("a"), usage={"prompt_tokens": 1, "completion_tokens": 7}),
        b'data: {"choices":[],"usage":{"completion_tokens":9}}',
        b'data: {"error":{"code":503}}',
        b'data: {"choices":[{"text":"\xff"}]}',
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}',
        b"data: [DONE]",
    ]
)
BYTES = st.binary(max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(EVENTS, max_size=12), st.sampled_from([1, 2, 3, 40]), BYTES)
@example(
    [chunk(piece("a")), chunk(piece("b")), chunk({"index": 0, "text": "ab", "token_ids": [1, 2]})], 1, b""
)
def test_nothing_that_is_read_depends_on_it(events: list[bytes], together: int, noise: bytes) -> None:
    """However many events a read brings, whatever stands in their texts."""
    events = [event.replace(b"tok", noise) for event in events if b"\n" not in noise and b"\r" not in noise]
    plain = Events()
    for event in events:
        plain.read(event[6:])
    sniffer, told = StreamSniffer(), 0
    for at in range(0, len(events), together):
        told += sniffer.feed(b"".join([event + b"\n\n" for event in events[at : at + together]]))
    assert astuple(sniffer.found) == astuple(plain.found)
    assert told == plain.found.tokens
