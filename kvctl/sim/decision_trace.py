"""A decision log (``v`` 1, as in docs/admin-api.md) as the traffic that made it.

One caller is one call, however often it tried: an arrival that asks for the same as one that was refused, of
the same tenant, is its next try when it comes when it was told to (in ``retry-after-ms``, or in the whole
seconds of ``Retry-After``), or under the same X-Request-Id. How long an answer is that nobody ever got is
not in the log: it is drawn from the answers that ended, of the same tenant and model where there are enough.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

from kvctl.sim.trace import Row, TraceError, opened

VERSION = 1
EARLY_S, LATE_S = 0.05, 0.5  # how far from the moment that it was told a next try may come
SAME_ID_WITHIN_S = 120.0
ENOUGH = 20  # answers of a tenant and model; else those of all
_REFUSED = frozenset({"reject_later", "unavailable"})
_NEVER = "reject_never"
_WHOLE = frozenset({"finished", "capped"})

Line = Mapping[str, Any]


@dataclass(slots=True, kw_only=True, eq=False)
class Told:
    """A caller of the log. Times in seconds from the first arrival; ``output`` None: it got no answer."""

    at_s: float
    tenant: str
    model: str
    prompts: tuple[int, ...]
    n: int
    cap: int | None
    tries: int = 1
    admitted_s: float | None = None
    first_token_s: float | None = None  # from admission
    seconds: float | None = None  # from admission to the end
    output: int | None = None  # over all sequences
    whole: bool = False  # the answer came to its own end, or to its cap
    leases: int = 0  # in flight when it was let in, with it

    @property
    def sequences(self) -> int:
        """Sequences that the engine runs for it."""
        return len(self.prompts) * self.n


@dataclass(slots=True, kw_only=True)
class DecisionTrace:
    """What a log tells. ``capacity_tokens`` and ``margin_ratio`` are the last ones in it."""

    callers: list[Told] = field(default_factory=list)
    capacity_tokens: int | None = None
    margin_ratio: float | None = None
    never: int = 0  # refused for good: left out
    dropped: int = 0  # records that the disk did not keep up with


def read_log(paths: Sequence[Path], engine: str | None = None) -> DecisionTrace:
    """The log's files, the oldest first or in any order. Raises TraceError, or OSError.

    ``engine`` may be None where the log is of one engine.
    """
    lines = sorted((line for path in paths for line in _lines(path)), key=lambda line: line["time"])
    engines = sorted({line["engine"] for line in lines if "engine" in line})
    if engine is None and len(engines) > 1:
        raise TraceError(f"the log is of several engines, name one of {', '.join(engines)}")
    if engine is not None and engine not in engines:
        raise TraceError(f"no engine {engine!r} in the log; there are {', '.join(engines)}")
    reader = _Reader()
    try:
        for line in lines:
            if engine is None or line.get("engine", engine) == engine:
                reader.take(line)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{paths[0]}: a line is no record of the decision log ({error!r})") from None
    if not reader.trace.callers:
        raise TraceError(f"{paths[0]}: no requests")
    return reader.trace


def _lines(path: Path) -> Iterator[Line]:
    with opened(path) as file:
        texts = [text for text in file if text.strip()]
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):  # still being written
                return
            raise TraceError(f"{path}, line {number}: {error}") from None
        if not isinstance(line, dict) or line.get("v") != VERSION or "time" not in line:
            raise TraceError(f"{path}, line {number}: not a line of a decision log, version {VERSION}")
        yield line


@dataclass(frozen=True, slots=True, eq=False)
class _Refused:
    """A try that was refused; ``named`` is its X-Request-Id, "" where it had none."""

    at: float
    hint_s: float
    named: str
    told: Told

    @property
    def latest_s(self) -> float:
        """Of its next try, if it does as it was told."""
        return ceil(self.hint_s) + LATE_S

    def comes_back(self, name: str, at: float) -> bool:
        """Whether one that asks for the same at that time is the same caller."""
        if self.named and name == self.named:
            return True
        return self.hint_s - EARLY_S <= at - self.at <= self.latest_s


class _Reader:
    def __init__(self) -> None:
        self.trace = DecisionTrace()
        self._began: float | None = None
        self._refused: dict[tuple[Any, ...], list[_Refused]] = defaultdict(list)
        self._by_lease: dict[str, Told] = {}

    def take(self, line: Line) -> None:
        kind = line.get("type")
        if kind == "decision":
            self._decision(line)
        elif kind == "end":
            self._end(line)
        elif kind == "dropped":
            self.trace.dropped += int(line["records"])

    def _seconds(self, line: Line) -> float:
        at = datetime.fromisoformat(line["time"]).timestamp()
        if self._began is None:
            self._began = at - float(line.get("waited_s") or 0.0)
        return at - self._began

    def _decision(self, line: Line) -> None:
        word, at = line["decision"], self._seconds(line)
        self.trace.capacity_tokens = line["capacity_tokens"] or self.trace.capacity_tokens
        self.trace.margin_ratio = line["margin_ratio"]
        if word == _NEVER:
            self.trace.never += 1
        elif word == "admit" or word in _REFUSED:
            told = self._caller(line, at)
            if word == "admit":
                told.admitted_s, told.leases = at, int(line["leases"])
                self._by_lease[line["lease"]] = told
            else:
                hint = float(line["retry_after_s"] or 1.0)
                named = line["id"] if line["id"] != line["lease"] else ""
                self._refused[_same(line)].append(_Refused(at, hint, named, told))

    def _caller(self, line: Line, at: float) -> Told:
        """The one that tries again, or a new one."""
        waiting = self._refused[_same(line)]
        waiting[:] = [one for one in waiting if at - one.at <= max(one.latest_s, SAME_ID_WITHIN_S)]
        for one in waiting:
            if one.comes_back(line["id"], at):
                waiting.remove(one)
                one.told.tries += 1
                return one.told
        told = Told(
            at_s=at - float(line["waited_s"]),
            tenant=line["tenant"],
            model=line["model"],
            prompts=tuple(max(int(prompt), 1) for prompt in line["prompts"]),
            n=int(line["n"]),
            cap=None if line["asked_output"] is None else max(int(line["asked_output"]), 1),
        )
        self.trace.callers.append(told)
        return told

    def _end(self, line: Line) -> None:
        told = self._by_lease.pop(line["lease"], None)
        if told is None:
            return
        told.seconds, told.first_token_s = float(line["seconds"]), line["first_token_s"]
        told.output, told.whole = int(line["output_tokens"]), line["end"] in _WHOLE


def _same(line: Line) -> tuple[Any, ...]:
    """What a caller that tries again asks for again."""
    asked = (line["tenant"], line["model"], line["route"], line["n"], line["asked_output"], line["stream"])
    return (*asked, *line["prompts"])


def rows_of(callers: Iterable[Told], seed: int) -> tuple[list[Row], dict[int, int | None], int]:
    """One row a sequence, the caps by the row's number, and how many lengths had to be drawn."""
    callers = sorted(callers, key=lambda told: told.at_s)
    source = random.Random(seed)  # noqa: S311 - a reproducible draw
    known = _lengths(callers)
    rows: list[Row] = []
    caps: dict[int, int | None] = {}
    drawn = 0
    for told in callers:
        if told.output is None:
            drawn += 1
        for prompt in [prompt for prompt in told.prompts for _ in range(told.n)]:
            output = _drawn(told, known, source) if told.output is None else told.output // told.sequences
            number = len(rows)
            caps[number] = told.cap
            rows.append(
                Row(
                    number=number,
                    at_s=max(told.at_s - callers[0].at_s, 0.0),
                    prompt_tokens=prompt,
                    output_tokens=max(output, 1),
                    tenant=told.tenant,
                )
            )
    return rows, caps, drawn


def _lengths(callers: Iterable[Told]) -> dict[tuple[str, ...], list[int]]:
    known: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for told in callers:
        if told.output is not None and told.whole:
            for key in ((told.tenant, told.model), ()):
                known[key].append(max(told.output // told.sequences, 1))
    return known


def _drawn(told: Told, known: Mapping[tuple[str, ...], list[int]], source: random.Random) -> int:
    own = known.get((told.tenant, told.model), [])
    lengths = own if len(own) >= ENOUGH else known.get((), [])
    length = source.choice(lengths) if lengths else (told.cap or 1)
    return length if told.cap is None else min(length, told.cap)
