"""Bodies of very many parts: refused before anything is built of them, on whatever engine and route."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.outcomes import ProxyFault
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.jsonbody import LARGE
from kvctl.proxy.structure import MOST_PARTS, has_too_many_parts, parts
from kvctl.tokens.base import Count
from kvctl.tokens.bound import TOKENS_PER_SCALAR, json_bound
from kvctl.tokens.media import MediaBounds, bound_of_all
from tests.proxy.harness import PLAIN, WordCounter, answering, plain, post, rig
from tests.proxy.several import Member, crowd

HEAD = b'{"model":"m","max_tokens":1,'


def chat(message: bytes, times: int) -> bytes:
    return HEAD + b'"messages":[' + b",".join([message] * times) + b"]}"


@pytest.mark.parametrize(
    ("body", "many"),
    [
        (chat(b"{}", MOST_PARTS), True),
        (chat(b"{}", MOST_PARTS // 2), False),
        (chat(b'"a"', MOST_PARTS), True),
        (chat(b"[]", MOST_PARTS), True),
        (HEAD + b'"x":{' + b'"a":1,' * MOST_PARTS + b'"b":1}}', True),
        (chat(b'{"role":"user","content":"a"}', MOST_PARTS // 7 + 1), True),
        (chat(b'{"role":"user","content":"a"}', MOST_PARTS // 8), False),
        (HEAD + b'"prompt":[' + b"1," * MOST_PARTS * 3 + b"1]}", False),
        (HEAD + b'"prompt":' + json.dumps('{"a": [{}]} \\"' * MOST_PARTS).encode() + b"}", False),
        (b'"' + b'\\"{' * MOST_PARTS, False),
        (b'"' + b"{" * MOST_PARTS + b"\\", False),
        (b"\\" * MOST_PARTS, False),
        (b"", False),
    ],
)
def test_what_stands_inside_strings_is_no_part(body: bytes, many: bool) -> None:
    assert has_too_many_parts(body) is many


def kinds_by_hand(body: bytes) -> list[bytes]:
    found, inside, escaped = [], False, False
    for each in (body[place : place + 1] for place in range(len(body))):
        if inside:
            inside, escaped = escaped or each != b'"', not escaped and each == b"\\"
        elif each in b'"{[:':
            found.append(each)
            inside = each == b'"'
    return found


@given(st.lists(st.sampled_from([b'"', b"\\", b"{", b"[", b":", b"ab", b",7"])).map(b"".join))
def test_a_body_searched_in_slices_has_the_parts_that_it_has_as_a_whole(body: bytes) -> None:
    for step in (2, 3, 5, 64):
        assert [part[:1] for part in parts(body, step)] == kinds_by_hand(body)


async def test_they_are_refused_and_nothing_is_sent() -> None:
    """Ten million messages of two bytes stopped the event loop for six seconds."""
    async with rig(answering(plain(PLAIN))) as it:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"):
            answer = await it.post(chat(b"{}", MOST_PARTS), path)
            assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
            assert b"request_too_large" in answer
        assert it.engine.accepted == 0
        await it.quiet()


async def test_several_engines_and_aliases_too() -> None:
    one, other = Member("a", named=("m",), aliases={"alias": "m"}), Member("b", models=("n",))
    async with crowd(one, other) as it:
        close = b"Connection: close"
        answer = await it.ask(post(chat(b"{}", MOST_PARTS), "/v1/chat/completions", close))
        assert answer.startswith(b"HTTP/1.1 413 ")
        text = b'{"role":"user","content":"%b"}' % (b"word " * LARGE)
        body = chat(text, 1).replace(b'"model":"m"', b'"model":"alias"')
        await it.ask(post(body, "/v1/chat/completions", close))
        assert [request.body for request in one.got if b"chat" in request.line] in (
            [],
            [body.replace(b'"alias"', b'"m"')],
        )


async def test_a_sound_is_no_json() -> None:
    boundary = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    sound = boundary + b"{[:" * MOST_PARTS + b"\r\n--b--\r\n"
    async with rig(answering(plain(b'{"text":"hi"}'))) as it:
        head = b"Content-Type: multipart/form-data; boundary=b"
        request = post(sound, "/v1/audio/transcriptions", b"connection: close", head)
        answer = await it.talk(request.replace(b"Content-Type: application/json\r\n", b"", 1))
        assert not answer.startswith(b"HTTP/1.1 413 "), answer[:200]


@pytest.mark.parametrize("items", [[1, 2.5, None, True], [1, "a", [2]], [], [[1, 2], [3]], [{"a": 1}, 2]])
def test_numbers_are_bounded_together_as_they_are_one_by_one(items: list[object]) -> None:
    alone = sum(json_bound(item) for item in items)
    assert json_bound(items) == 2 + len(items) + alone
    assert json_bound([7] * 1000) == 2 + 1000 * (1 + TOKENS_PER_SCALAR)
    whole = bound_of_all({"x": items}, MediaBounds())
    assert whole == bound_of_all({"x": [*items, "a"]}, MediaBounds()) - 1 - 3


class _Starved(WordCounter):
    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        del model, body, body_bytes
        raise MemoryError


async def test_a_body_that_there_is_no_memory_for_may_come_again() -> None:
    """The unit bounds the process's memory, too: that is no defect of kvctl, and no fault of its caller."""
    async with rig(answering(plain(PLAIN)), reader=Reader(_Starved(), VLLM())) as it:
        answer = await it.post()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"body_memory" in answer
        assert b"Retry-After: 1" in answer
        assert it.seen.faults == [ProxyFault.BODY_MEMORY]
        assert it.engine.accepted == 0
        await it.quiet()
