"""Who comes when: Poisson arrivals with bursts, or a stretch of a trace; and the prompts' texts.

Rows are those of the replay, so that the same load can be replayed in virtual time.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from kvctl.sim.lengths import LogNormal
from kvctl.sim.trace import Row, at_rate, read_trace, that_fit, window
from tests.live.model import corpus_lines

BURSTS = "bursts"
PROMPTS = LogNormal(mean=300, sigma=0.5, low=32, high=1500)
ANSWERS = LogNormal(mean=300, sigma=0.8, low=4, high=2048)
CYCLE_S, BURST_S, BURST_TIMES = 10.0, 2.0, 2.25  # two seconds of every ten bring 2.25 times the mean
LONGEST_ANSWER = 2048  # the cap that callers declare: no answer is longer
TEMPLATE = 12  # tokens that a chat template adds, about
SPACE = "\u0120"  # as a byte-level vocabulary writes it


def arrivals(
    workload: str, rate: float, seconds: float, seed: int, context: int, *, prefixes: bool = False
) -> list[Row]:
    """``workload`` is ``bursts`` or the path of a trace; the mean rate is ``rate`` requests a second.

    ``prefixes``: prompts of a trace begin alike as its rows did, and where some are longer than the context
    all are scaled down alike. Without it no two begin alike, and what does not fit is left out.
    """
    if workload == BURSTS:
        return _bursts(rate, seconds, seed)
    rows = [row for row in read_trace(Path(workload)) if row.output_tokens <= LONGEST_ANSWER]
    if prefixes:
        rows = scaled(rows, context - TEMPLATE)
    rows = that_fit(rows, context - TEMPLATE)
    count = max(round(rate * seconds), 2)
    start = (seed - 1) * 3001 % max(len(rows) - count, 1)
    chosen = at_rate(window(rows, start, count), rate)
    chosen = [replace(row, output_tokens=max(row.output_tokens, 2)) for row in chosen]
    if prefixes:
        return chosen
    return [replace(row, number=number, lineage=(), parent=None) for number, row in enumerate(chosen)]


def scaled(rows: Sequence[Row], context: int) -> list[Row]:
    """With all prompts, and where they part, shortened alike, so that the longest fits a context."""
    factor = min(1.0, (context - LONGEST_ANSWER) / max(row.prompt_tokens for row in rows))
    return [
        replace(
            row,
            prompt_tokens=max(int(row.prompt_tokens * factor), 1),
            lineage=tuple((int(end * factor), owner) for end, owner in row.lineage),
        )
        for row in rows
    ]


def _bursts(rate: float, seconds: float, seed: int) -> list[Row]:
    source = random.Random(seed)
    calm = (CYCLE_S - BURST_S * BURST_TIMES) / (CYCLE_S - BURST_S)
    begins = source.uniform(0.0, CYCLE_S - BURST_S)
    at, rows = 0.0, list[Row]()
    while True:
        in_burst = begins <= at % CYCLE_S < begins + BURST_S
        at += source.expovariate(rate * (BURST_TIMES if in_burst else calm))
        if at >= seconds:
            return rows
        prompt, output = PROMPTS.draw(source), ANSWERS.draw(source)
        rows.append(Row(number=len(rows), at_s=at, prompt_tokens=prompt, output_tokens=output))


class Texts(Protocol):
    """Makes prompts of so many tokens. ``words`` are a token each, wherever they stand."""

    words: Sequence[str]

    def make(self, source: random.Random, tokens: int) -> str:
        """A text that begins as no other does."""


class RealTexts:
    """For an engine with the tokenizer of that model folder."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._spoken = [word for line in corpus_lines() if line.isascii() for word in line.split()]
        known = (token[1:] for token in self._tokenizer.get_vocab() if token.startswith(SPACE))
        self.words: Sequence[str] = sorted(f" {word}" for word in known if word.isalpha() and word.isascii())

    def make(self, source: random.Random, tokens: int) -> str:
        """About that many tokens."""
        text = f"{source.getrandbits(64):x} " + " ".join(source.choices(self._spoken, k=tokens))
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return text[: found.offsets[min(tokens, len(found)) - 1][1]]


class SimTexts:
    """For the simulated engine: four bytes are a token."""

    words: Sequence[str] = tuple(f" {a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "nrst")

    def make(self, source: random.Random, tokens: int) -> str:
        """That many tokens."""
        beginning = f"{source.getrandbits(64):016x}"
        return (beginning + " once more" * (tokens * 4 // 10 + 1))[: tokens * 4]


def prompts(texts: Texts, rows: Sequence[Row], salt: str, common: int) -> Iterator[str]:
    """The text of each row, all alike for ``common`` tokens; other runs, by ``salt``, have other texts.

    Rows of a lineage begin as it says.
    """
    source = random.Random(salt)
    beginning = texts.make(source, common) + " " if common else ""
    descended = any(row.lineage for row in rows)
    for row in rows:
        if descended:
            yield "".join(_descended(texts.words, row, salt))
        else:
            yield beginning + texts.make(source, max(row.prompt_tokens - TEMPLATE, 1))


def _descended(words: Sequence[str], row: Row, salt: str) -> Iterator[str]:
    """A row's prompt in parts, each of the words that whoever brought it first has at that place."""
    length, start = max(row.prompt_tokens - TEMPLATE, 1), 0
    for end, owner in (*row.lineage, (length, row.number)):
        stop = min(end, length)
        if stop > start:
            own = random.Random(f"{salt} {owner}").choices(words, k=stop)
            yield "".join(own[start:stop])
            start = stop
