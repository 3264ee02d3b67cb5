"""Long texts cut between words have the tokens that they have in one piece, or are not cut."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvctl.tokens.between_words import LONG, adds_up_between_words, parts
from kvctl.tokens.segments import Segments
from tests.effort import examples
from tests.tokens.tiny import IM_END, IM_START, train

WORDS = (
    *(
        "the",
        "quick",
        "it's",
        "they're",
        "HTTPServer",
        "x1",
        "2nd",
        "1,234.5",
        "e.g.",
        "na\u00efve",
        "\u6771\u4eac",
    ),
    *(
        "\u0441\u043e\u0431\u0430\u043a\u0430",
        "\U0001f600",
        "a",
        "def f(x):",
        "\n\n",
        "\r\n",
        "\t",
        "  ",
        "   a",
        "...",
        "'",
        "\u2019s",
    ),
    *(
        IM_START,
        IM_END,
        "<s>",
        "</s>",
        "<|eot_id|>",
        "#",
        "\u00a0",
        "\u0301",
        "'S",
        "I'LL",
        "\u1e9e",
        "\u2581",
        "\u0120",
    ),
)
Change = Callable[[Tokenizer], None]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return found


def long_text(dice: random.Random, characters: int = 4 * LONG) -> str:
    """Mixed runs of words of one kind and of all kinds, some of them joined without a space."""
    made: list[str] = []
    size = 0
    while size < characters:
        some = dice.sample(WORDS, dice.randint(1, len(WORDS)))
        run = dice.choice((" ", " ", " ", "")).join(dice.choices(some, k=dice.randint(1, 80)))
        made.append(run)
        size += len(run) + 1
    return " ".join(made)


def agree(tokenizer: Tokenizer, text: str) -> bool:
    made = Segments(tokenizer).count(text, add_special_tokens=False, with_ids=True)
    return made.ids is not None and made.ids.tolist() == ids(tokenizer, text)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_parts_add_up(seed: int) -> None:
    assert agree(train(), long_text(random.Random(seed)))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(WORDS)), st.lists(st.sampled_from(WORDS)), st.sampled_from("akz"))
def test_any_two_halves_add_up(before: list[str], behind: list[str], letter: str) -> None:
    tokenizer = train()
    first, second = " ".join(before) + letter, f" {letter}" + " ".join(behind)
    assert ids(tokenizer, first + second) == ids(tokenizer, first) + ids(tokenizer, second)


def test_parts_are_the_text_and_begin_alike() -> None:
    dice = random.Random(5)
    text = long_text(dice)
    made = list(parts(text))
    assert "".join(made) == text
    assert all(len(part) >= LONG for part in made[:-1])
    assert all(part[0] == " " for part in made[1:])
    assert list(parts(text + " and more of it"))[: len(made) - 1] == made[:-1]


@pytest.mark.parametrize(
    "text", ["", "a", "a b", "x" * 5 * LONG, "\u6771" * 5 * LONG, "A B " * LONG, " " * 3 * LONG]
)
def test_what_has_no_place_to_cut_stays_whole(text: str) -> None:
    assert list(parts(text)) == [text]


def _prepends(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Prepend("x")


def _strips(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])


def _replaces_two(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("e l", "X")


def _replaces_by_pattern(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex(" +$"), "")


def _splits_otherwise(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def _looks_back(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(r"(?<=the) \p{L}+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def _has_two_words(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("the lazy", normalized=False)])


def _takes_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("jumps", rstrip=True, special=True)])


@pytest.mark.parametrize(
    "change",
    [
        *(_prepends, _strips, _replaces_two, _replaces_by_pattern, _splits_otherwise, _looks_back),
        *(_has_two_words, _takes_spaces),
    ],
)
def test_a_tokenizer_that_looks_over_the_cut_is_not_trusted(change: Change) -> None:
    tokenizer = train()
    assert adds_up_between_words(tokenizer)
    change(tokenizer)
    assert not adds_up_between_words(tokenizer)
    text = "The quick brown fox jumps over the lazy dog " * (3 * LONG // 44)
    assert agree(tokenizer, text)


def test_merges_over_a_space_are_seen() -> None:
    """As in vocabularies whose tokens are phrases."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {text: number for number, text in enumerate([*letters, "\u2581", "b\u2581", "b\u2581c"])}
    merges = [("b", "\u2581"), ("b\u2581", "c")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="never")
    assert not adds_up_between_words(tokenizer)
    assert agree(tokenizer, "ab cd " * LONG)


def test_other_kinds_of_models_are_not_cut() -> None:
    for model in (models.WordLevel({"a": 0}, "a"), models.Unigram([("a", 0.0)], 0)):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert not adds_up_between_words(tokenizer)


def test_a_long_text_is_known_again_up_to_where_it_changes(tmp_path: Path) -> None:
    """Without a special token in it: as completions are."""
    train().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    kept: dict[str, Any] = json.loads((tmp_path / "tokenizer.json").read_text())
    assert kept["model"]["type"] == "BPE"
    segments, text = Segments(tokenizer), "the quick brown fox " * (10 * LONG // 20)
    segments.count(text, add_special_tokens=True, with_ids=False)
    before = segments.tally.tokenised
    segments.count(text + " and what is new", add_special_tokens=True, with_ids=False)
    assert segments.tally.tokenised - before < 3 * LONG
