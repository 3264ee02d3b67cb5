"""A chat that comes again is known, and by nothing less than all that its count depends on."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.tokens.begin import Tokens
from kvctl.tokens.files import load_files
from kvctl.tokens.repeated import MOST_BYTES, Repeated, chat_key
from kvctl.tokens.source import View
from kvctl.tokens.tokeniser import Tokeniser
from tests.effort import examples
from tests.tokens.tiny import CHATML, write

USER = {"role": "user", "content": "Why is the sky blue?"}
VIEW, SHARING = View(8192), View(8192, begins=True)
# Bodies that a template or the counting may tell apart.
DIFFERENT: tuple[dict[str, Any], ...] = (
    {},
    {"tools": None},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": [{"function": {"name": "f"}, "type": "function"}]},
    {"documents": []},
    {"documents": [{"title": 1}]},
    {"documents": [{"title": 1.0}]},
    {"documents": [{"title": True}]},
    {"documents": [{"title": "1"}]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"enable_thinking": 0}},
    {"chat_template": "x"},
    {"reasoning_effort": "none"},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"add_special_tokens": True},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenisers(folder: Path) -> tuple[Tokeniser, Tokeniser]:
    """One that knows more and more, and one to compare it with."""
    return Tokeniser(load_files(folder)), Tokeniser(load_files(folder))


def fresh(tokeniser: Tokeniser, body: dict[str, Any], view: View) -> tuple[int, ...]:
    """The count of one that remembers no chat."""
    tokeniser._repeated = Repeated(0)
    return tokeniser.chat(body, view)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


def test_a_chat_that_comes_again_is_not_tokenised(folder: Path) -> None:
    tokeniser = Tokeniser(load_files(folder))
    first = tokeniser.chat(chat(), VIEW)
    before = tokeniser.tally.tokenised
    assert tokeniser.chat(chat(max_tokens=5), VIEW) == first
    assert tokeniser.tally.tokenised == before
    assert tokeniser.tally.spared == before


def test_what_decides_the_count_makes_another_key() -> None:
    keys = [chat_key(chat(**more), VIEW) for more in DIFFERENT]
    keys += [chat_key(chat(), other) for other in (View(None), View(4096), SHARING)]
    keys += [chat_key({"messages": [{**USER, "content": text}]}, VIEW) for text in ("", "a", "\ud800", "ä")]
    keys += [chat_key({"messages": [dict(reversed(USER.items()))]}, VIEW)]
    assert all(one is not None and one != other for one, other in combinations(keys, 2))
    assert chat_key(chat(max_tokens=1, user="u"), VIEW) == chat_key(chat(), VIEW)


def test_how_it_begins_comes_again_too(folder: Path) -> None:
    tokeniser = Tokeniser(load_files(folder))
    body = {"messages": [{"role": "user", "content": "one two " * 200}]}
    (first,), (again,) = tokeniser.chat(body, SHARING), tokeniser.chat(body, SHARING)
    assert isinstance(first, Tokens)
    assert isinstance(again, Tokens)
    assert (again, again.prefix) == (first, first.prefix)
    assert first.prefix
    assert not isinstance(tokeniser.chat(body, VIEW)[0], Tokens)


def test_long_chats_and_odd_ones_are_not_kept() -> None:
    assert chat_key({"messages": [{**USER, "content": "x" * MOST_BYTES}]}, VIEW) is None
    assert chat_key({"messages": [object()]}, VIEW) is None


@pytest.mark.parametrize("unsteady", ["{{ strftime_now('%S') }}", "{{ [1, 22] | random }}", "{{ lipsum() }}"])
def test_a_template_that_prints_something_else_each_time_is_always_asked(
    tmp_path: Path, unsteady: str
) -> None:
    tokeniser = Tokeniser(load_files(write(tmp_path, {"chat_template": CHATML + unsteady})))
    tokeniser.chat(chat(), VIEW)
    before = tokeniser.tally.tokenised
    tokeniser.chat(chat(), VIEW)
    assert tokeniser.tally.tokenised > before


def test_only_so_many_are_kept() -> None:
    repeated = Repeated(2)
    for number in range(3):
        repeated.keep(b"%d" % number, number, 1)
        repeated.find(b"0")
    assert [repeated.find(b"%d" % number) for number in range(3)] == [(0, 1), None, (2, 1)]


def plain() -> st.SearchStrategy[list[dict[str, Any]]]:
    texts = st.sampled_from(
        ["", " ", "a", "a b", "<|im_end|>", "été 東京\n", "x" * 300, "x-anthropic-billing-header"]
    )
    roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
    return st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=4)


def options() -> Iterator[dict[str, Any]]:
    yield from (
        more for more in DIFFERENT if "chat_template" not in more and "continue_final" not in str(more)
    )


@settings(max_examples=examples(60), deadline=None)
@given(plain(), st.sampled_from(list(options())), st.booleans())
def test_a_known_count_is_the_true_one(
    tokenisers: tuple[Tokeniser, Tokeniser],
    messages: list[dict[str, Any]],
    more: dict[str, Any],
    begins: bool,
) -> None:
    knowing, other = tokenisers
    view, body = View(8192, begins), {"messages": messages, **more}
    if more.get("documents") is not None:
        body["chat_template_kwargs"] = {}
    true = fresh(other, body, view)
    for _ in range(2):
        (count,) = knowing.chat(body, view)
        assert (count, getattr(count, "prefix", None)) == (true[0], getattr(true[0], "prefix", None))
