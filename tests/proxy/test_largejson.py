"""Large bodies are read as the engine reads them, and without keeping the loop."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.proxy import jsonbody, largejson
from kvctl.proxy.jsonbody import LARGE, read_object
from kvctl.proxy.largejson import LONG, NotPlainError, parse_large
from kvctl.proxy.limits import BadRequest
from tests.effort import examples

TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(
    ['"', "\\", '\\"', "\U0001f600", "\u00e9" * 9, "a" * 50, "\n", "\x7f", "\ud800", "\udc00"]
)
LONG_TEXT = st.lists(TEXT, max_size=12).map("".join)
VALUES = st.recursive(
    LONG_TEXT | st.integers() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(LONG_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, ascii_only=st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_what_is_read_is_what_the_engine_reads(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largejson, "LONG", 16)
        try:
            data, bones = parse_large(body)
        except NotPlainError:
            return
    assert data == json.loads(body)
    assert len(bones) <= len(body) + 40 * body.count(b'"')


@given(body=st.binary(max_size=80) | st.text('{}[]":,\\au0d81', max_size=60).map(str.encode))
@settings(max_examples=examples(400), deadline=None)
def test_what_is_no_json_is_left_to_the_others(body: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largejson, "LONG", 4)
        try:
            data, _ = parse_large(body)
        except NotPlainError:
            return
    assert data == json.loads(body)


@pytest.mark.parametrize(
    "text",
    ["word " * 60_000, "\u6771\u4eac" * 90_000, "\U0001f600" * 60_000, 'a"b\\c\n' * 50_000, "\\" * 200_001],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_texts_of_all_kinds(text: str, ascii_only: bool) -> None:
    given = {"model": "m", "messages": [{"role": "user", "content": text}, {"content": text[:99]}], "n": 2}
    body = json.dumps(given, ensure_ascii=ascii_only).encode()
    data, bones = parse_large(body)
    assert data == given
    assert len(bones) < LONG
    assert read_object(body) == given


@pytest.mark.parametrize("key", ["max_tokens", "model"])
def test_a_second_deciding_key_is_found_behind_long_texts(key: str) -> None:
    body = b'{"%s": 1, "prompt": "%s \\"n\\": \\"n\\": ", "%s": 2}' % (
        key.encode(),
        b"x" * LARGE,
        key.encode(),
    )
    refused = read_object(body)
    assert isinstance(refused, BadRequest)
    assert refused.param == key


@pytest.mark.parametrize("tail", [b"", b'"', b'"}', b'"]', b'\\"}', b'"} x', b'\xff"}', b'\x01"}'])
def test_broken_large_bodies_are_answered_as_small_ones_are(tail: bytes) -> None:
    large, small = (b'{"prompt": "' + b"x" * size + tail for size in (LARGE, 5))
    assert isinstance(read_object(large), BadRequest) == isinstance(read_object(small), BadRequest)


async def test_the_loop_runs_on_meanwhile() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "The quick brown fox\n" * 800_000}]}).encode()
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    heart = asyncio.create_task(beat())
    assert isinstance(await jsonbody.read(body), dict)
    heart.cancel()
    assert beats > 20
