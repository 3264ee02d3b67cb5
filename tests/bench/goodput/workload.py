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


def arrivals(workload: str, rate: float, seconds: float, seed: int, context: int) -> list[Row]:
    """``workload`` is ``bursts`` or the path of a trace; the mean rate is ``rate`` requests a second."""
    if workload == BURSTS:
        return _bursts(rate, seconds, seed)
    rows = that_fit(read_trace(Path(workload)), context - TEMPLATE)
    rows = [row for row in rows if row.output_tokens <= LONGEST_ANSWER]
    count = max(round(rate * seconds), 2)
    start = (seed - 1) * 3001 % max(len(rows) - count, 1)
    chosen = at_rate(window(rows, start, count), rate)
    return [
        replace(row, number=number, output_tokens=max(row.output_tokens, 2), lineage=(), parent=None)
        for number, row in enumerate(chosen)
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
    """Makes prompts of so many tokens."""

    def make(self, source: random.Random, tokens: int) -> str:
        """A text that begins as no other does."""


class RealTexts:
    """For an engine with the tokenizer of that model folder."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._words = [word for line in corpus_lines() if line.isascii() for word in line.split()]

    def make(self, source: random.Random, tokens: int) -> str:
        """About that many tokens."""
        text = f"{source.getrandbits(64):x} " + " ".join(source.choices(self._words, k=tokens))
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return text[: found.offsets[min(tokens, len(found)) - 1][1]]


class SimTexts:
    """For the simulated engine: four bytes are a token."""

    def make(self, source: random.Random, tokens: int) -> str:
        """That many tokens."""
        beginning = f"{source.getrandbits(64):016x}"
        return (beginning + " once more" * (tokens * 4 // 10 + 1))[: tokens * 4]


def prompts(texts: Texts, rows: Sequence[Row], salt: str, common: int) -> Iterator[str]:
    """The text of each row, all alike for ``common`` tokens; other runs, by ``salt``, have other texts."""
    source = random.Random(salt)
    beginning = texts.make(source, common) + " " if common else ""
    for row in rows:
        yield beginning + texts.make(source, max(row.prompt_tokens - TEMPLATE, 1))
