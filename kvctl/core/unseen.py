"""When a request whose end nobody reports is over: judged by what the engine's page shows.

The engine is asked for a background response by its id. One that failed may be reported as waiting for ever,
and one whose id is not known cannot be asked for. Its lease is then ended by one of these:

* **The engine holds no request.** A request that lives is running or waiting from its first step on, so a
  page that shows neither contradicts it, unless the page is older than that step. Pages at four states of the
  engine's counters cannot all be: between two of them a step ended, and each step begins with what has come.
  Where no counter moves, half of the stall timeout does, after which the engine itself is in doubt.
* **The engine is another process** than the one that took the request.
* **It would have ended long ago.** While nobody waits, a request that lives is running, and then it makes a
  token a step. Tokens are added up at the measured pace until they are three times what it may make; at a
  tenth of the pace where somebody waits, or no page tells, and not at all while the engine does not serve.

Tools that the engine runs make it silent between two turns: then it must show nothing for ten minutes, or
three times as many tokens as ten turns may make.
"""

from dataclasses import dataclass

from kvctl.core.outcomes import SERVING, EndReason, EngineState
from kvctl.core.telemetry import RankSample, is_another_process

SETTLE_S = 1.0  # after which an engine has certainly seen what its API server took
EMPTY_STATES = 4
STALL_SHARE = 1 / 2
TOOL_SILENCE_S = 600.0
TIMES_ITS_TOKENS = 3.0
TURNS = 10
LEAST_S = 60.0  # of work before anything is overdue: prompts are computed in it
DOUBTED = 0.1  # of the pace, while it is not known whether it runs
LONGEST_STEP_S = 5.0  # longest time between two looks that is counted

_SHOWN = frozenset({EngineState.UP, EngineState.LATE, EngineState.TRIAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What a gate knows of its engine's work. ``at``: when the page was read; None: there is none."""

    state: EngineState
    at: float | None
    samples: tuple[RankSample, ...]
    seconds_per_step: float  # of decoding
    stall_timeout_s: float

    @property
    def shown(self) -> bool:
        """Whether the page can be trusted."""
        return self.state in _SHOWN and not any(sample.unsupported for sample in self.samples)

    @property
    def requests(self) -> int | None:
        """Requests that run or wait, over all ranks; None: the page does not tell."""
        counts = [count for s in self.samples for count in (s.running, s.waiting)]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    @property
    def nobody_waits(self) -> bool:
        """Whether the page says that nobody waits."""
        return bool(self.samples) and all(s.waiting == 0 for s in self.samples)

    @property
    def counters(self) -> tuple[float | None, ...]:
        """Prompt and output tokens so far, rank by rank."""
        return tuple([n for s in self.samples for n in (s.prompt_tokens_total, s.generation_tokens_total)])


class Unseen:
    """Judges one request without a reported end, look by look.

    ``begun_at``: when the engine had it, monotonic seconds. ``output``: most tokens that a sequence of it may
    make. ``turns``: the engine may run tools for it, and go on.
    """

    def __init__(self, begun_at: float, output: int, *, turns: bool = False) -> None:
        self._begun_at = begun_at
        self._most = TIMES_ITS_TOKENS * output * (TURNS if turns else 1)
        self._turns = turns
        self._looked_at = begun_at
        self._worked_s = self._tokens = 0.0
        self._empty_since: float | None = None
        self._empty_states: set[tuple[float | None, ...]] = set()
        self._samples: tuple[RankSample, ...] = ()
        self.restarted = False  # whether the engine restarted since the request began

    def look(self, work: EngineWork, now: float) -> EndReason | None:
        """What the engine shows now; the reason for which the request must be over, None: it may live."""
        self._compare(work)
        self._work_on(work, now)
        if self._is_empty(work):
            return EndReason.ENGINE_IDLE
        late = self._tokens >= self._most and self._worked_s >= LEAST_S
        return EndReason.OVERDUE if late else None

    def _compare(self, work: EngineWork) -> None:
        before = {sample.rank: sample for sample in self._samples}
        known = [sample for sample in work.samples if sample.rank in before and not sample.unsupported]
        self.restarted |= any(is_another_process(before[sample.rank], sample) for sample in known)
        self._samples = work.samples

    def _work_on(self, work: EngineWork, now: float) -> None:
        seconds = min(max(now - self._looked_at, 0.0), LONGEST_STEP_S)
        self._looked_at = now
        if work.state not in SERVING:
            return
        if not (work.shown and work.nobody_waits):
            seconds *= DOUBTED
        self._worked_s += seconds
        self._tokens += seconds / work.seconds_per_step

    def _is_empty(self, work: EngineWork) -> bool:
        at = work.at
        if not work.shown or at is None or at <= self._begun_at + SETTLE_S:
            return False
        if work.requests != 0:
            self._empty_since = None
            return False
        if self._empty_since is None:
            self._empty_since = at
        silent_s = at - self._empty_since
        if self._turns:
            return silent_s >= TOOL_SILENCE_S
        if None not in work.counters:
            self._empty_states.add(work.counters)
        return len(self._empty_states) >= EMPTY_STATES or silent_s >= STALL_SHARE * work.stall_timeout_s
