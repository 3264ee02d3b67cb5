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
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvctl.sim.trace import BROKEN, Row, TraceError, opened

VERSION = 1
EARLY_S, LATE_S = 0.05, 0.5  # how far from the moment that it was told a next try may come
SAME_ID_WITHIN_S = 120.0
CLOCK_SET_S = 1.0  # a step of the clock between two lines: what NTP slews is less
ENOUGH = 20  # answers of a tenant and model; else those of all
_REFUSED = frozenset({"reject_later", "unavailable"})
_NEVER, _QUEUE = "reject_never", "queue"
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
    torn: int = 0  # lines that a crash cut short


def read_log(paths: Sequence[Path], engine: str | None = None) -> DecisionTrace:
    """The log's files, the oldest first or in any order. Raises TraceError, or OSError.

    ``engine`` may be None where the log is of one engine.
    """
    reader = _Reader()
    try:
        lines = sorted((each for path in paths for each in _dated(path, reader.trace)), key=itemgetter(0))
        only = _engine(lines, engine)
        for at, line in lines:
            if line.get("engine", only) == only:
                reader.take(line, at)
    except TraceError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{paths[0]}: a line is no record of the decision log ({error!r})") from None
    if not reader.trace.callers:
        raise TraceError(f"{paths[0]}: no requests")
    return reader.trace


def _engine(lines: Iterable[tuple[float, Line]], wanted: str | None) -> str:
    """Whose decisions are meant."""
    engines = sorted({line["engine"] for _, line in lines if "engine" in line})
    if wanted is None and len(engines) > 1:
        raise TraceError(f"the log is of several engines, name one of {', '.join(engines)}")
    if wanted is not None and wanted not in engines:
        raise TraceError(f"no engine {wanted!r} in the log; there are {', '.join(engines)}")
    return wanted or "".join(engines)


def _dated(path: Path, trace: DecisionTrace) -> Iterator[tuple[float, Line]]:
    """The lines of a file with their seconds since the epoch, by the clock as it stood at the first.

    When the clock is set, ``time`` moves and ``at`` does not; ``at`` falls when the machine starts anew. What
    was lost has no time of its own: it is of the line before.
    """
    wall = shift = 0.0
    before: tuple[float, float] | None = None  # (at, wall - at)
    for line in _lines(path, trace):
        if "time" in line:
            wall = datetime.fromisoformat(line["time"]).timestamp()
            if "at" in line:
                at = float(line["at"])
                if before is not None and at >= before[0] and abs(wall - at - before[1]) > CLOCK_SET_S:
                    shift += wall - at - before[1]
                before = at, wall - at
        yield wall - shift, line


def _lines(path: Path, trace: DecisionTrace) -> Iterator[Line]:
    """The records of a file. Lines that a crash tore are counted; the last may still be being written."""
    good = 0
    torn: list[str] = []
    with opened(path, errors="replace") as file:
        try:
            texts = [(number, text) for number, text in enumerate(file, 1) if text.strip()]
        except BROKEN as error:
            raise TraceError(f"{path}: {error}") from None
    for number, text in texts:
        try:
            line = json.loads(text)
        except ValueError as error:
            if (number, text) != texts[-1]:
                torn.append(f"{path}, line {number}: {error}")
            continue
        if not isinstance(line, dict) or line.get("v") != VERSION or not ("time" in line or _is_loss(line)):
            told = f"{path}, line {number}: not a line of a decision log, version {VERSION}"
            raise TraceError(told if good or not torn else torn[0])
        good += 1
        yield line
    if torn and not good:
        raise TraceError(torn[0])
    trace.torn += len(torn)


def _is_loss(line: Line) -> bool:
    return line.get("type") == "dropped"


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
        self._queued: dict[str, tuple[Line, float]] = {}

    def take(self, line: Line, at: float) -> None:
        """A record, and its seconds since the epoch; the oldest first."""
        kind = line.get("type")
        if _is_loss(line):
            self.trace.dropped += int(line["records"])
            return
        if self._began is None:
            self._began = at - float(line.get("waited_s") or 0.0)
        if kind == "decision":
            self._decision(line, at - self._began)
        elif kind == "end":
            self._end(line)

    def _decision(self, line: Line, at: float) -> None:
        word = line["decision"]
        self.trace.capacity_tokens = line["capacity_tokens"] or self.trace.capacity_tokens
        self.trace.margin_ratio = line["margin_ratio"]
        if word == _QUEUE:
            self._queued[line["lease"]] = line, at
            return
        self._queued.pop(line["lease"], None)
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
            if (queued := self._queued.pop(line["lease"], None)) is not None:
                self._caller(*queued)  # it left the queue: it asked all the same
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
