"""From a decision log to a scene: the traffic, the pool, and an engine as fast as the one in the log."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def measured_profile(trace: DecisionTrace) -> Profile:
    """Step times by the answers in the log. Raises SetupError where there are too few.

    Seconds per token are a step's base and its share for each sequence that ran beside (those of the log, at
    the middle of the answer); the least time to a first token grows with its prompt. What reading the KV
    cache costs is part of the former.
    """
    answers = [told for told in trace.callers if _tells_pace(told)]
    if len(answers) < ENOUGH:
        raise SetupError(f"{len(answers)} whole answers in the log are too few to measure an engine by")
    spans = [(told.admitted_s or 0.0, (told.admitted_s or 0.0) + (told.seconds or 0.0)) for told in answers]
    beside = [_running(spans, (begin + end) / 2) for begin, end in spans]
    base, each = fit([(1.0, float(count)) for count in beside], [_pace(told) for told in answers])
    alone = [(float(sum(told.prompts)), told.first_token_s or 0.0) for told in answers]
    prefill = _least_slope(alone)
    return Profile(
        name=MEASURED,
        about=f"measured by {len(answers)} answers of a decision log",
        base_s=max(base, 1e-4),
        prefill_token_s=prefill,
        decode_sequence_s=each,
        kv_token_s=0.0,
    )


def _tells_pace(told: Told) -> bool:
    return (
        told.admitted_s is not None
        and told.seconds is not None
        and told.first_token_s is not None
        and told.sequences == 1
        and (told.output or 0) >= LONG_ENOUGH
    )


def _pace(told: Told) -> float:
    return ((told.seconds or 0.0) - (told.first_token_s or 0.0)) / max((told.output or 0) - 1, 1)


def _running(spans: Sequence[tuple[float, float]], at: float) -> int:
    return sum(begin <= at < end for begin, end in spans)


def _least_slope(points: Sequence[tuple[float, float]]) -> float:
    """Seconds per prompt token of those that hardly waited: the median of the lower half's ratios."""
    ratios = sorted(seconds / prompt for prompt, seconds in points if prompt)
    return ratios[len(ratios) // 4] if ratios else 0.0


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
