"""From a decision log to a scene: the traffic, the pool, and an engine as fast as the one in the log."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvctl.sim.decision_trace import DecisionTrace, Told, rows_of
from kvctl.sim.fitting import fit
from kvctl.sim.profiles import Profile
from kvctl.sim.replay import Call, Run, Scene
from kvctl.sim.replay_setup import SetupError
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.trace import Row, TraceError, at_rate, that_fit, window

MEASURED = "measured"
ENOUGH = 20  # answers to measure step times by
LONG_ENOUGH = 8  # tokens of an answer that tells a pace
SHORTEST_STEP_S = 1e-4


def measured_profile(trace: DecisionTrace) -> Profile:
    """Step times by the answers in the log. Raises SetupError where there are too few.

    An answer of ``n`` tokens takes, after its first, ``n - 1`` steps and whatever prompts were computed in
    them:  seconds = base x steps + decode_sequence x steps x beside + prefill_token x prompts,  with
    ``beside`` the sequences that ran in its middle. Reading the KV cache is part of the second term.
    """
    spans = [_span(told) for told in trace.callers if told.seconds is not None]
    answers = [span for span in spans if span.output >= LONG_ENOUGH]
    if len(answers) < ENOUGH:
        few = f"{len(answers)} answers of {LONG_ENOUGH} tokens or more are too few to measure an engine by"
        raise SetupError(f"{few}: {ENOUGH} are needed in the log; or name one with --engine-profile")
    beside = _Beside(spans)
    rows = [beside.amounts(answer) for answer in answers]
    base, each, prompt = fit(rows, [answer.end - answer.first for answer in answers])
    return Profile(
        name=MEASURED,
        about=f"measured by {len(answers)} answers of a decision log",
        base_s=max(base, SHORTEST_STEP_S),
        prefill_token_s=prompt,
        decode_sequence_s=each,
        kv_token_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """When an answer's tokens came; ``output`` 0: it tells no pace."""

    first: float
    end: float
    prompt: int
    output: int


def _span(told: Told) -> _Span:
    admitted = told.admitted_s or 0.0
    end = admitted + (told.seconds or 0.0)
    first = end if told.first_token_s is None else admitted + told.first_token_s
    output = 0 if told.first_token_s is None or told.sequences > 1 else (told.output or 0)
    return _Span(first, end, sum(told.prompts), output)


class _Beside:
    """What ran and what began at a time, of all answers of a log."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        by_first = sorted(spans, key=lambda span: span.first)
        self._firsts = [span.first for span in by_first]
        self._prompts = [0, *accumulate(span.prompt for span in by_first)]
        self._ends = sorted(span.end for span in spans)

    def amounts(self, answer: _Span) -> tuple[float, float, float]:
        """Steps, steps times what ran beside, and prompt tokens computed meanwhile."""
        middle, steps = (answer.first + answer.end) / 2, answer.output - 1
        beside = bisect_right(self._firsts, middle) - bisect_right(self._ends, middle)
        begun = bisect_right(self._firsts, answer.end), bisect_right(self._firsts, answer.first)
        prompts = self._prompts[begun[0]] - self._prompts[begun[1]]
        return float(steps), float(steps * beside), float(prompts)


@dataclass(frozen=True, slots=True)
class LogScene:
    """A scene, what really came of its calls, and how many answers' lengths had to be drawn."""

    scene: Scene
    recorded: Run
    drawn: int


def log_scene(
    trace: DecisionTrace,
    engine: EngineConfig,
    *,
    rate: float | None = None,
    start: int = 0,
    requests: int | None = None,
    retries: int = 2,
    seed: int = 1,
) -> LogScene:
    """The log's callers in front of an engine, each with the limit that it sent. Raises SetupError."""
    callers = sorted(trace.callers, key=lambda told: told.at_s)
    callers = callers[start:] if requests is None else callers[start : start + requests]
    if len(callers) < 2:
        raise SetupError(f"the log has {len(trace.callers)} callers, fewer than two from {start} on")
    rows, caps, drawn = rows_of(callers, seed)
    try:
        rows = at_rate(window(that_fit(rows, engine.max_model_len), 0, None), rate)
    except TraceError as error:
        raise SetupError(f"{error} that fit a context of {engine.max_model_len} tokens") from None
    if len(rows) < 2 or rows[-1].at_s <= 0.0:
        raise SetupError("a replay needs two requests at two times")
    scene = Scene(rows=rows, engine=engine, cap=lambda row: caps[row.number], retries=retries, seed=seed)
    return LogScene(scene, Run(calls=[_call(told, callers[0].at_s) for told in callers]), drawn)


def _call(told: Told, began: float) -> Call:
    """What became of a caller, as a replay would have told it."""
    at = told.at_s - began
    row = Row(number=0, at_s=at, prompt_tokens=sum(told.prompts), output_tokens=max(told.output or 1, 1))
    call = Call(row=row, cap=told.cap, tries=told.tries, retries=told.tries - 1)
    if told.admitted_s is None:
        call.given_up = True
        return call
    call.retries_admitted = int(told.tries > 1)
    admitted = told.admitted_s - began
    if told.first_token_s is not None:
        call.first_at = admitted + told.first_token_s
    if told.whole and told.seconds is not None:
        call.ended_at, call.complete = admitted + told.seconds, True
        call.output = max((told.output or 0) // told.sequences, 1)
    return call
