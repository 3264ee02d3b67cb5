"""How the prompts of a trace begin, told without any text.

A row's ``lineage`` says which row first brought the tokens up to each place: ``(end, row)``, rising; what
comes after is its own. The tokens before a place are then known by that place and the row that brought the
last of them, which makes hashes that are equal where the beginnings are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvctl.core.claim import Prefix
from kvctl.sim.trace import Row

BORDER = 128  # tokens, as the daemon's own tokenizer sets them
SYSTEM = -1  # brought by no row: a system prompt that all have in common


def with_system_prompt(rows: Sequence[Row], tokens: int) -> list[Row]:
    """The same rows behind a common prompt of so many tokens."""
    if not tokens:
        return list(rows)
    return [
        replace(
            row,
            prompt_tokens=row.prompt_tokens + tokens,
            lineage=((tokens, SYSTEM), *((end + tokens, owner) for end, owner in row.lineage)),
        )
        for row in rows
    ]


def block_hashes(row: Row, block: int) -> tuple[int, ...]:
    """Of the full blocks of a row's prompt, for the engine."""
    return tuple(known for _, known in _places(row, block, row.prompt_tokens))


def prefix(row: Row) -> Prefix:
    """How a row's prompt begins, for the gate."""
    return tuple(_places(row, BORDER, row.prompt_tokens - 1))


def _places(row: Row, every: int, last: int) -> Iterator[tuple[int, int]]:
    """(tokens, hash) at every so many tokens up to ``last``."""
    start = 0
    for end, owner in (*row.lineage, (last, row.number)):
        known = (owner + 2) << 32
        for place in range((start // every + 1) * every, min(end, last) + 1, every):
            yield place, known | place
        start = min(end, last)
