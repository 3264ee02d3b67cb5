"""The first look at a body: its model, how it begins, and the one value that an alias changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.proxy.dispatch import Makers
from kvctl.proxy.flow import IdWatch
from kvctl.proxy.merge import merged
from kvctl.proxy.peek import peek, renamed
from tests.proxy.several import Member

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
bodies = st.dictionaries(
    st.text(max_size=8) | st.sampled_from(["model", "messages", "prompt", "tools"]), values
)


@given(bodies, st.text(max_size=20), st.text(max_size=20), st.booleans(), st.integers(0, 3))
def test_renaming_changes_the_model_and_nothing_else(
    body: dict[str, object], model: str, other: str, ascii_only: bool, indent: int
) -> None:
    body["model"] = model
    before = json.dumps(body, ensure_ascii=ascii_only, indent=indent or None).encode("utf-8", "surrogatepass")
    after = renamed(before, other)
    assert after is not None
    assert json.loads(after) == body | {"model": other}
    value = json.dumps(model, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    head, _, tail = after.partition(json.dumps(other, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    assert before.startswith(head) or before.endswith(tail) or value in before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'{"model":3}',
        b'{"model":null}',
        b'{"a":{"model":"x"}}',
        b'["model","x"]',
        b'{"model"',
    ],
)
def test_what_has_no_name_is_not_renamed(body: bytes) -> None:
    assert renamed(body, "m") is None
    assert peek(body).model == ""


@given(st.binary(max_size=60))
def test_a_look_at_anything_never_fails(body: bytes) -> None:
    peek(body)
    peek(b'{"messages":' + body + b"}")
    renamed(body, "m")


def test_a_look_at_any_depth_never_fails() -> None:
    """What may be skipped at a depth may be too deep to be built."""
    for depth in range(850, 1050):
        peek(b'{"model":' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("body", [b'{"model":"m","x":NaN}', '{"model":"m"}'.encode("utf-16")])
def test_what_only_pythons_parser_takes_has_its_model_too(body: bytes) -> None:
    assert peek(body).model == "m"


def chat(*texts: str, **more: object) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": t} for t in texts]} | more
    ).encode()


def test_turns_of_one_session_begin_alike() -> None:
    (first,), (second,) = peek(chat("a", "b")).prefixes, peek(chat("a", "b", "c")).prefixes
    assert second[:2] == first
    (other,) = peek(chat("x", "b")).prefixes
    assert not {key for _, key in first} & {key for _, key in other}


def test_another_model_or_other_tools_begin_otherwise() -> None:
    (first,), (second,) = peek(chat("a")).prefixes, peek(chat("a", tools=[{"f": 1}])).prefixes
    assert first != second


def test_plain_prompts_begin_alike_by_steps() -> None:
    long = "word " * 2000
    one = peek(json.dumps({"model": "m", "prompt": long + "x"}).encode()).prefixes[0]
    two = peek(json.dumps({"model": "m", "prompt": long + "something else"}).encode()).prefixes[0]
    assert one == two
    assert peek(b'{"model":"m","prompt":"short"}').prefixes == ()


def test_stored_responses_are_remembered_in_number() -> None:
    makers = Makers(most=2)
    for number in range(3):
        makers.made(f"r{number}", Member("a"))  # type: ignore[arg-type]
    assert makers.of("r0") is None
    assert makers.of("r2") is not None


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_id_of_a_response_is_found_however_it_is_cut(size: int) -> None:
    told: list[str] = []
    data = b'event: response.created\ndata: {"type":"x","response":{"id": "resp_ab-1","id2":"resp_2"}}\n\n'
    watch: IdWatch | None = IdWatch(told.append)
    for start in range(0, len(data), size):
        watch = watch.feed(data[start : start + size]) if watch is not None else None
    assert told == ["resp_ab-1"]


def test_an_answer_without_an_id_is_not_kept() -> None:
    watch: IdWatch | None = IdWatch(lambda _: pytest.fail("no id"))
    for _ in range(10):
        watch = watch.feed(b"x" * 1000) if watch is not None else None
    assert watch is None


def test_a_list_that_is_no_list_adds_nothing() -> None:
    assert merged([(b"nonsense", {}), (b'{"data":3}', {}), (b'{"data":[{"id":"m"},{},3]}', {})]) == [
        {"id": "m"}
    ]
