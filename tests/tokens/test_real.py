"""The tokenizers of real models: loaded as the engine loads them, and counted by their parts."""

import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken

from kvctl.tokens.between_words import LONG, adds_up_between_words, parts
from kvctl.tokens.files import ModelFiles, TokenizerError, load_files
from kvctl.tokens.segments import Segments, cutting_tokens
from kvctl.tokens.source import View
from kvctl.tokens.tokeniser import Tokeniser
from tests.effort import examples
from tests.live.model import corpus_lines
from tests.tokens.real import PACKAGED, real_model
from tests.tokens.test_between_words import WORDS, agree, ids, long_text

TEXTS = (
    "The quick brown fox, 1,234 times; na\u00efve \u6771\u4eac \U0001f600",
    " leading space,\ttab\n\n    indent == 1e-5",
    "",
    "a<s> b</s>c<|eot_id|> d <|im_end|>\n x",
    "hello",
)
# Tokens of each text, special ones included, as transformers 5.19 counts them with the same files.
TRUE = {
    "llama3_1": (16, 14, 1, 16, 2),
    "llama3": (15, 13, 0, 15, 1),
    "llama2": (23, 16, 1, 24, 3),
    "qwen3": (19, 13, 0, 19, 1),
    "qwen2_5": (19, 13, 0, 19, 1),
    "gemma3": (17, 15, 1, 22, 2),
    "deepseek_v3": (16, 14, 0, 23, 1),
    "mistral_nemo": (19, 15, 1, 21, 2),  # tekken; mistral-common 1.13 says the same of texts without specials
}


@cache
def loaded(name: str) -> ModelFiles:
    return load_files(real_model(name))


@pytest.fixture(params=PACKAGED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_counts_are_those_of_the_engines_library(name: str) -> None:
    tokenizer = loaded(name).tokenizer
    assert tuple(len(tokenizer.encode(text)) for text in TEXTS) == TRUE[name]


def test_parts_add_up_over_the_corpus(name: str) -> None:
    files = loaded(name)
    cut = cutting_tokens(files.tokenizer)[0]
    cached, lines = Segments(files.tokenizer, part=32), corpus_lines()
    assert cached.works
    for number in range(len(lines)):
        text = f"{lines[number - 1]}{cut}{cut} {lines[number]}\n{cut}\n{lines[number][:40]}"
        for specials in (False, True):
            part = cached.count(text, add_special_tokens=specials, with_ids=True)
            assert list(part.ids or ()) == files.tokenizer.encode(text, add_special_tokens=specials).ids


def test_they_add_up_between_words(name: str) -> None:
    tokenizer = loaded(name).tokenizer
    assert adds_up_between_words(tokenizer)
    dice, text = random.Random(name), long_text(random.Random(name), 2 * LONG)
    assert len(list(parts(text))) > 1
    assert agree(tokenizer, text)
    for _ in range(examples(60)):
        first = " ".join(dice.choices(WORDS, k=dice.randint(0, 6))) + dice.choice("aksz")
        second = f" {dice.choice('abst')}" + " ".join(dice.choices(WORDS, k=dice.randint(0, 6)))
        assert ids(tokenizer, first + second) == ids(tokenizer, first) + ids(tokenizer, second)


def test_the_next_turn_is_counted_alone(name: str) -> None:
    files = loaded(name)
    if not files.templates:
        pytest.skip("it comes without a chat template")
    lines = corpus_lines() * 2
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": f"{line}\n" * 6} for n, line in enumerate(lines)
    ]
    tokeniser = Tokeniser(files)
    tokeniser.chat({"messages": turns[:99]}, View())
    before = tokeniser.tally.tokenised
    (count,) = tokeniser.chat({"messages": turns[:101]}, View())
    new = sum(len(turn["content"]) for turn in turns[99:101])
    # a template without a token at the end of a user's turn is cut before the turn
    assert tokeniser.tally.tokenised - before < new + len(turns[98]["content"]) + 600
    assert (count,) == Tokeniser(files).chat({"messages": turns[:101]}, View())


def test_tokens_that_eat_white_space_add_up_too() -> None:
    """As Phi 3 has them, over Llama 2's vocabulary."""
    tokenizer = load_files(real_model("llama2")).tokenizer
    words = ("<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
    tokenizer.add_special_tokens([AddedToken(w, rstrip=True, normalized=False, special=True) for w in words])
    cached = Segments(tokenizer, words, part=8)
    assert cached.works
    for line in corpus_lines():
        text = f"<|user|>\n {line}<|end|>\n<|assistant|>  {line}<|end|> <|user|>"
        part = cached.count(text, add_special_tokens=True, with_ids=True)
        assert list(part.ids or ()) == tokenizer.encode(text).ids


def test_tokens_that_eat_white_space_on_both_sides() -> None:
    """As Phi 4 has them, over GPT-4's vocabulary: no text can be cut at them, so it is counted whole."""
    tokenizer = load_files(real_model("gpt35turbo")).tokenizer
    words = ("<|im_start|>", "<|im_end|>", "<|im_sep|>")
    eating = [AddedToken(w, lstrip=True, rstrip=True, normalized=False, special=True) for w in words]
    tokenizer.add_special_tokens(eating)
    cached = Segments(tokenizer, words, part=8)
    for line in corpus_lines():
        text = f"<|im_start|>user<|im_sep|>\n {line} \n<|im_end|>\t<|im_start|> assistant<|im_sep|>  {line}"
        part = cached.count(text, add_special_tokens=True, with_ids=True)
        assert list(part.ids or ()) == tokenizer.encode(text).ids


def test_one_eating_token_among_others_is_no_cut() -> None:
    """The others still are: parts end before them, and what eats stands within a part."""
    tokenizer = load_files(real_model("gpt35turbo")).tokenizer
    kept = [AddedToken(w, rstrip=True, normalized=False, special=True) for w in ("<|user|>", "<|end|>")]
    eats = AddedToken("<|tool|>", lstrip=True, rstrip=True, normalized=False, special=True)
    tokenizer.add_special_tokens([*kept, eats])
    cached = Segments(tokenizer, ("<|user|>", "<|end|>", "<|tool|>"), part=8)
    assert cached.works
    for line in corpus_lines():
        text = f"<|user|> {line} <|tool|> \n<|end|>\n <|tool|>{line}  <|end|> <|tool|><|user|>\n"
        part = cached.count(text, add_special_tokens=True, with_ids=True)
        assert list(part.ids or ()) == tokenizer.encode(text).ids


def test_a_folder_of_tekken_alone_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r'tekken\.json.*"engine"'):
        load_files(tmp_path)


@pytest.mark.parametrize("text", ["x" * 300_000, "a" * 1_000_000, "\x00\x01\x7f" * 50_000, "=-" * 150_000])
def test_pathological_texts_end(text: str) -> None:
    """A12: one word of 300 kB, a million times one letter, control characters, punctuation without end."""
    (count,) = Tokeniser(loaded("qwen3")).texts([text], True, View())
    assert 0 < count <= len(text)
