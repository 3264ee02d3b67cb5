"""Counts of parts add up to the count of the whole, or are not used."""

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from kvctl.tokens.begin import prefix_of
from kvctl.tokens.files import load_files
from kvctl.tokens.segments import Segments, adds_up, cutting_tokens
from kvctl.tokens.source import View
from kvctl.tokens.tokeniser import Tokeniser
from tests.effort import examples
from tests.tokens.tiny import BOS, EOS, IM_END, IM_START, train, write


def prepending() -> Tokenizer:
    """As Llama 2's file has it: every piece of text gets a space before it."""
    made = train()
    made.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.NFKC()])
    return made


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = train()
        made.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
        return made

    return make


def eating_spaces() -> Tokenizer:
    """As Phi 3 has it: tokens that take the white space behind them along."""
    made = train(with_chat_tokens=False)
    tokens = [AddedToken(text, special=True, normalized=False, rstrip=True) for text in (IM_START, IM_END)]
    made.add_special_tokens(tokens)
    return made


def confusing() -> Tokenizer:
    """Tokens that hide, lengthen and overlap one another."""
    made = train()
    texts = ("<|im_end|>\n", "d|><|im", "a<|en", "</tool>", "word")
    made.add_tokens([AddedToken(text, normalized=False) for text in texts])
    made.add_special_tokens(
        [AddedToken("<tool>", lstrip=True, special=True), AddedToken("|>", special=False)]
    )
    return made


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": train,
    "prepending": prepending,
    "metaspace-first": metaspace("first"),
    "metaspace-always": metaspace("always"),
    "eating-spaces": eating_spaces,
    "confusing": confusing,
}

WORDS = [BOS, EOS, IM_START, IM_END, "<|im_", "end|>", "|>", "<", "<tool>", "</tool>", " ", "  ", "\n", "\t"]
WORDS += [
    "\n\n",
    "a",
    "The quick",
    " brown",
    "'s",
    "12",
    "345",
    "\u00e9",
    "e\u0301",
    "\u2581",
    "\u6771\u4eac",
]
WORDS += ["\U0001f600", "\ufb01", "word", "a<|en"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=40).map("".join) | st.text(max_size=60)


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def cached(tokenizer: Tokenizer) -> Segments:
    return Segments(tokenizer, part=8, most_entries=50)


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), specials=st.booleans(), ids=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_parts_add_up(
    tokenizer: Tokenizer, cached: Segments, texts: list[str], specials: bool, ids: bool
) -> None:
    for text in (*texts, "".join(texts), f"{IM_START}".join(texts)):
        true = tokenizer.encode(text, add_special_tokens=specials).ids
        for _ in range(2):  # counted, and then known
            part = cached.count(text, add_special_tokens=specials, with_ids=ids)
            assert part.tokens == len(true)
            assert part.ids is None or list(part.ids) == true


def test_all_of_them_can_be_cut(tokenizer: Tokenizer, cached: Segments) -> None:
    assert cached.works
    assert cutting_tokens(tokenizer)


def test_tokens_that_others_hide_or_lengthen_cut_nothing() -> None:
    made = confusing()
    assert set(cutting_tokens(made)).isdisjoint({IM_END, EOS, "<tool>", "|>", "word", "d|><|im"})
    assert BOS in cutting_tokens(made)
    assert cutting_tokens(made, [EOS, "</tool>"]) == ("</tool>",)


def test_a_tokenizer_that_does_not_add_up_is_found_out_and_not_cut() -> None:
    """Tokens that are looked for in normalised text stay within what is normalised together."""
    made = train(with_chat_tokens=False)
    made.normalizer = normalizers.Prepend("_")
    made.add_tokens([AddedToken("<|turn|>", normalized=True)])
    assert not adds_up(made, ["<|turn|>"])
    cached = Segments(made, ["<|turn|>"])
    text = "a<|turn|>b" * 200
    assert cached.count(text, add_special_tokens=False, with_ids=False).tokens == len(
        made.encode(text, add_special_tokens=False)
    )


CHAT = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS), min_size=1, max_size=6
).map(lambda turns: [{"role": role, "content": text} for role, text in turns])


@given(messages=CHAT, more=CHAT, tools=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_chats_count_as_their_rendered_text_does(
    tiny: tuple[Tokeniser, Any], messages: list[dict[str, str]], more: list[dict[str, str]], tools: bool
) -> None:
    tokeniser, files = tiny
    for chat in (messages, messages + more):
        body: dict[str, Any] = {"messages": chat}
        if tools:
            body["tools"] = [{"type": "function", "function": {"name": "weather", "description": "d " * 99}}]
        fresh = Tokeniser(files)
        (count,) = tokeniser.chat(body, View(begins=True))
        (again,) = fresh.chat(body, View(begins=True))
        assert count == again
        assert getattr(count, "prefix", None) == getattr(again, "prefix", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokeniser, Any]:
    files = load_files(write(tmp_path_factory.mktemp("tiny")))
    return Tokeniser(files), files


def chat_of(turns: int) -> list[dict[str, str]]:
    words = "The quick brown fox, 1,234 times; " * 12
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{n}: {words}"} for n in range(turns)]


@pytest.mark.parametrize("begins", [False, True])
def test_the_next_turn_of_a_long_chat_is_tokenised_alone(tmp_path: Path, begins: bool) -> None:
    files, view = load_files(write(tmp_path)), View(begins=begins)
    tokeniser = Tokeniser(files)
    tokeniser.chat({"messages": chat_of(99)}, view)
    before = tokeniser.tally.tokenised
    (count,) = tokeniser.chat({"messages": chat_of(101)}, view)
    new = sum(len(message["content"]) for message in chat_of(101)[-2:])
    assert tokeniser.tally.tokenised - before < new + 600
    assert tokeniser.tally.spared > 35_000
    assert (count,) == Tokeniser(files).chat({"messages": chat_of(101)}, view)


def test_hashes_of_beginnings_are_those_of_the_whole(tmp_path: Path) -> None:
    files = load_files(write(tmp_path))
    text = "".join(f"{IM_START}user\n{n} The quick brown fox{IM_END}\n" for n in range(200))
    (count,) = Tokeniser(files).texts([text], True, View(begins=True))
    assert getattr(count, "prefix", None) == prefix_of(files.tokenizer.encode(text).ids)


def test_the_store_is_bounded_in_entries_and_bytes() -> None:
    made = train()
    cached = Segments(made, part=8, most_entries=10)
    few = Segments(made, part=8, most_bytes=5000)
    for n in range(100):
        text = f"{IM_START}user {n} some words{IM_END}" * 3
        for each in (cached, few):
            each.count(text, add_special_tokens=False, with_ids=True)
            entries, size = each.size
            assert entries <= (10 if each is cached else 25)
            assert each is cached or size <= 5000
    assert cached.size[0] == 10


def test_several_threads_count_at_once() -> None:
    made = train()
    cached = Segments(made, part=8, most_entries=20)
    texts = [f"{IM_START}user {n % 7} words{IM_END}" * (n % 5 + 1) for n in range(200)]
    wrong: list[str] = []

    def count(texts: list[str]) -> None:
        for text in texts:
            tokens = cached.count(text, add_special_tokens=True, with_ids=False).tokens
            if tokens != len(made.encode(text)):
                wrong.append(text)

    threads = [threading.Thread(target=count, args=(texts[start:],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_texts_that_begin_alike_share_their_parts() -> None:
    made = train()
    cached = Segments(made, part=64)
    turns = [f"{IM_START}user\nturn {n} with some words{IM_END}\n" for n in range(100)]
    growing = ["".join(turns[:n]) for n in range(90, 100)]
    cached.count(growing[0], add_special_tokens=False, with_ids=False)
    for shorter, longer in pairwise(growing):
        before = cached.tally.tokenised
        cached.count(longer, add_special_tokens=False, with_ids=False)
        assert cached.tally.tokenised - before <= len(longer) - len(shorter) + 2 * 64
