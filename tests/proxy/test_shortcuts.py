"""What is usual is read in few steps: it must come to what the long way comes to."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.engines.vllm import VLLM
from kvctl.proxy import headers, jsonbody
from kvctl.proxy.limits import LARGEST, BadRequest
from kvctl.proxy.readers.base import Facts
from kvctl.proxy.readers.openai import chat_limits, completion_limits
from tests.effort import examples
from tests.proxy.harness import WordCounter

FACTS = Facts(counter=WordCounter(), engine=VLLM())

numbers = st.one_of(
    st.integers(-2, 9),
    st.sampled_from(
        [LARGEST, LARGEST + 1, -(2**70), 2**70, 7.0, 7.5, True, False, None, "7", " 7 ", "1e2", [1]]
    ),
)
limits = st.dictionaries(
    st.sampled_from(["max_tokens", "max_completion_tokens", "n", "best_of", "echo"]), numbers, max_size=4
)


@settings(max_examples=examples(400))
@given(body=limits)
def test_limits_alone_are_read_as_among_others(body: dict[str, Any]) -> None:
    """An unset ``truncate_prompt_tokens`` says nothing, and takes the long way."""
    beside = body | {"truncate_prompt_tokens": None}
    assert chat_limits(FACTS, body) == chat_limits(FACTS, beside)
    assert completion_limits(FACTS, body) == completion_limits(FACTS, beside)


keys = st.sampled_from(['"n"', '"\\u006e"', '"model"', '"messages"', '"user"', '"x:y"', '"max_tokens"'])
plain_values = st.sampled_from(["1", '"a:b"', "null", '"\\":\\""', "[1, 2]", "{}", '{"n": 1, "n": 2}'])
spaces = st.sampled_from(["", " ", "\n\t"])


def an_object(pairs: list[tuple[str, str, str]]) -> str:
    return "{" + ",".join(f"{key}{space}:{space}{value}" for key, value, space in pairs) + "}"


objects = st.lists(st.tuples(keys, plain_values, spaces), max_size=3).map(an_object)
lists = st.lists(objects | plain_values, max_size=3).map(lambda items: "[" + ",".join(items) + "]")
bodies = st.lists(st.tuples(keys, plain_values | lists, spaces), max_size=5).map(an_object)


@settings(max_examples=examples(600))
@given(text=bodies)
def test_a_deciding_key_is_found_twice_wherever_it_stands(text: str) -> None:
    top: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        top[:] = [key for key, _ in pairs]
        return dict(pairs)

    expected = json.loads(text, object_pairs_hook=keep)
    twice = any(top.count(key) > 1 for key in jsonbody.DECIDING)
    read = jsonbody.read_object(text.encode())
    if twice:
        assert isinstance(read, BadRequest)
        assert "more than once" in read.message
    else:
        assert read == expected


def test_every_pair_of_messages_has_its_own_colon() -> None:
    """A second ``n`` may not hide behind a colon that a message lacks: strings count as no pairs."""
    read = jsonbody.read_object(b'{"messages": ["abc"], "n": 1, "n": 2}')
    assert isinstance(read, BadRequest)


@pytest.mark.parametrize(
    ("connection", "left"),
    [
        ([], [b"X-Secret", b"X-Forwarded-Host"]),
        ([b"keep-alive"], [b"X-Secret", b"X-Forwarded-Host"]),
        ([b"Keep-Alive"], [b"X-Secret", b"X-Forwarded-Host"]),
        ([b"close, X-Secret"], [b"X-Forwarded-Host"]),
        ([b"keep-alive", b"x-secret"], [b"X-Forwarded-Host"]),
        ([b"x-secret , host"], []),
    ],
)
def test_what_connection_names_stays_here(connection: list[bytes], left: list[bytes]) -> None:
    sent = [(b"Host", b"a"), (b"X-Secret", b"1"), (b"Keep-Alive", b"timeout=5")]
    sent += [(b"Connection", value) for value in connection]
    lines = headers.for_engine(sent, peer=None, scheme="http", request_id="r")
    assert [name for name, _ in lines] == [*left, b"X-Forwarded-Proto", b"X-Request-Id"]
