"""Cuts long texts between two words, where the token counts of the parts add up whatever the words are.

The cut is before the space in ``[a-z] [a-z]``. It is made only with a tokenizer of which it is known that

* nothing before the space depends on what comes behind, and the other way round: its splitting patterns are
  from ``_ALTERNATIVES``, each of which matches a space only at its first place or in a run of white space,
  and looks ahead only from white space; so one match ends at the cut and the next one begins there, and both
  halves give the same matches;
* nothing in its vocabulary has a space behind a letter, so no BPE merge crosses the cut;
* its normaliser changes characters one by one, or composes them, and a space is composed with nothing;
* no token that is matched before all else has a space behind a letter in it, or takes the spaces behind
  itself.

A part is tokenised in a few milliseconds. Between two parts another thread gets its turn, whereas one long
text would keep the interpreter for as long as several events of a stream.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

LONG = 16_384  # characters: a part has at least so many, and ends at the next cut
_CUT = re.compile("[a-z](?= [a-z])")
_SPACES = " \u0120\u2581"  # as themselves, in byte-level vocabularies, in those of SentencePiece
_INSIDE = re.compile(f"[a-zA-Z][{_SPACES}]")

_NOT_WORD, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ALTERNATIVES = frozenset(
    {
        *(_SHORT, "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(_NOT_WORD + r"\p{L}+", r" ?\p{L}+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
        *(f"{_NOT_WORD}{_UPPER}*{_LOWER}+", f"{_NOT_WORD}{_UPPER}+{_LOWER}*"),
        *(f"{_NOT_WORD}{_UPPER}*{_LOWER}+{_SHORT}?", f"{_NOT_WORD}{_UPPER}+{_LOWER}*{_SHORT}?"),
        *(r"\p{N}{1,3}", r"\p{N}", r" ?\p{N}+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{N}]+"),
        *(r" ?[\p{P}\p{S}]+[\r\n]*", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
        *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    }
)
_BAR = re.compile(r"\[(?:\\.|[^\]\\])*\]|\([^()]*\)|\\.|[^|\[(\\]|(\|)", re.DOTALL)

_BEFORE = (
    "a",
    "The end",
    "it's",
    "caf\u00e9s",
    "12a",
    "(b",
    "\n\nx",
    "HTTPs",
    "\u6771a",
    "...q",
    "\U0001f600z",
    "#x",
)
_BEHIND = (
    " a",
    " b c",
    " the end.",
    " x12",
    " it's\n",
    " y\u00e9",
    " z\u6771",
    " q(",
    " s  ",
    " s\n\nx",
    " tHE",
    " d's",
)


def parts(text: str) -> Iterator[str]:
    """``text`` in parts of ``LONG`` characters or more, as far as it has places to cut.

    Texts that begin alike have the same parts, except for the last one where they are still alike.
    """
    start, look = 0, LONG
    while look < len(text):
        found = _CUT.search(text, look, look + LONG)
        if found is not None:
            yield text[start : found.end()]
            start = found.end()
        look = (look if found is None else start) + LONG
    yield text[start:]


def adds_up_between_words(tokenizer: Tokenizer) -> bool:
    """Whether ``tokenizer`` is known to meet the conditions for cutting, and passes a trial."""
    return (
        _splits_known(_described(tokenizer.pre_tokenizer))
        and _normalises_known(_described(tokenizer.normalizer))
        and _merges_within_words(tokenizer)
        and _added_tokens_within_words(tokenizer)
        and _tried_out(tokenizer)
    )


def _described(component: Any) -> dict[str, Any]:
    """The component's own description; empty where there is none."""
    found = None if component is None else json.loads(component.__getstate__())
    return found if isinstance(found, dict) else {}


def _splits_known(described: dict[str, Any]) -> bool:
    kind = described.get("type")
    if kind == "Sequence":
        return all(map(_splits_known, described["pretokenizers"]))
    if kind == "Split":
        pattern = described["pattern"]
        return pattern.get("String") == " " or set(_alternatives(pattern.get("Regex", ""))) <= _ALTERNATIVES
    return kind in ("ByteLevel", "Metaspace", "Digits")


def _alternatives(pattern: str) -> Sequence[str]:
    """The alternatives at a pattern's top level; line ends are written as escapes or as themselves."""
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    bars = [found.start() for found in _BAR.finditer(pattern) if found[1]]
    return [pattern[start + 1 : end] for start, end in zip([-1, *bars], [*bars, len(pattern)], strict=True)]


def _normalises_known(described: dict[str, Any]) -> bool:
    kind = described.get("type")
    if kind == "Sequence":
        return all(map(_normalises_known, described["normalizers"]))
    if kind == "Replace":
        return len(described["pattern"].get("String", "")) == 1
    return kind in (None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase")


def _merges_within_words(tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    if (
        not isinstance(model, BPE)
        or model.dropout
        or model.end_of_word_suffix
        or model.continuing_subword_prefix
    ):
        return False
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False).keys() - added  # those are never merged to
    known = vocabulary >= set(ascii_lowercase) and not vocabulary.isdisjoint(_SPACES)
    return known and _INSIDE.search("\n".join(vocabulary)) is None


def _added_tokens_within_words(tokenizer: Tokenizer) -> bool:
    space = " " if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(" ")
    spaced = re.compile(f"[a-zA-Z](?: |{re.escape(space)})")
    return not any(
        spaced.search(token.content) or (token.rstrip and token.content[-1:].isalnum())
        for token in tokenizer.get_added_tokens_decoder().values()
    )


def _tried_out(tokenizer: Tokenizer) -> bool:
    def ids(text: str) -> list[int]:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        found: list[int] = encoding.ids
        return found

    return all(
        ids(before + behind) == ids(before) + ids(behind) for before, behind in product(_BEFORE, _BEHIND)
    )
