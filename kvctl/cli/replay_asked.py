"""The options of ``kvctl replay``, and what of them is to be replayed: a trace or a decision log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kvctl.cli.replay import USUAL_POLICIES
from kvctl.sim.decision_trace import DecisionTrace, read_log
from kvctl.sim.log_scene import MEASURED, log_scene, measured_profile
from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_faults import Fault, parse_fault, shifted
from kvctl.sim.replay_setup import SetupError, caps, engine_config, make_scene, read_profile
from kvctl.sim.trace import read_trace

USUAL_PROFILE, USUAL_CAP, USUAL_MARGIN, USUAL_REQUESTS = "8b-24g", "4096", "5%", 1500
LOG_POLICIES = ("forecast",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options as given."""

    trace: Path | None = None
    logs: Sequence[Path] = ()
    engine: str | None = None
    policies: Sequence[str] = ()
    profile: str | None = None
    capacity_tokens: int | None = None
    context: int | None = None
    rate: float | None = None
    cap: str | None = None
    margins: str | None = None
    start: int = 0
    requests: int | None = None
    ttft: float = 2.0
    itl: float = 0.1
    retries: int = 2
    faults: Sequence[str] = ()
    prefix_caching: bool | None = None
    shared_prefix: int = 0
    prefix_sharing: str = "auto"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Staged:
    """What is to be replayed, with the policies and margin to compare by default."""

    scene: Scene
    policies: Sequence[str]
    margin: str
    recorded: Run | None = None
    remarks: Sequence[str] = ()


def staged(asked: Asked) -> Staged:
    """The traffic of the trace or of the log.

    Raises UsageError, ValueError or OSError with a text for the user.
    """
    if bool(asked.logs) == (asked.trace is not None):
        raise click.UsageError("Give a trace or --log, one of them.")
    try:
        caps(asked.cap or USUAL_CAP)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    return _staged_log(asked) if asked.logs else Staged(_scene(asked), USUAL_POLICIES, USUAL_MARGIN)


def _scene(asked: Asked) -> Scene:
    if asked.engine is not None:
        raise click.UsageError("--engine goes with --log.")
    return make_scene(
        read_trace(asked.trace or Path()),
        engine_config(
            read_profile(asked.profile or USUAL_PROFILE),
            asked.capacity_tokens,
            asked.context,
            prefix_caching=asked.shared_prefix > 0 if asked.prefix_caching is None else asked.prefix_caching,
        ),
        cap=asked.cap or USUAL_CAP,
        rate=asked.rate,
        start=asked.start,
        requests=asked.requests or USUAL_REQUESTS,
        retries=asked.retries,
        seed=asked.seed,
        faults=[_fault(text) for text in asked.faults],
        shared_prefix=asked.shared_prefix,
    )


def _staged_log(asked: Asked) -> Staged:
    if asked.shared_prefix or asked.prefix_caching:
        raise SetupError("a decision log does not say how prompts begin: no prefixes in its replay")
    trace = read_log(asked.logs, asked.engine)
    capacity = asked.capacity_tokens or trace.capacity_tokens
    if capacity is None:
        raise SetupError("the log knows no capacity: give --capacity-tokens")
    profile = asked.profile or MEASURED
    engine = engine_config(
        measured_profile(trace) if profile == MEASURED else read_profile(profile), capacity, asked.context
    )
    made = log_scene(
        trace,
        engine,
        rate=asked.rate,
        start=asked.start,
        requests=asked.requests,
        retries=asked.retries,
        seed=asked.seed,
    )
    faults = [_fault(text) for text in asked.faults]
    scene = replace(made.scene, rows=shifted(made.scene.rows, faults, engine.max_model_len), faults=faults)
    if asked.cap is not None:
        scene = replace(scene, cap=caps(asked.cap))
    margin = 0.05 if trace.margin_ratio is None else trace.margin_ratio
    recorded = made.recorded if asked.rate is None else None
    return Staged(scene, LOG_POLICIES, f"{margin * 100:g}%", recorded, tuple(_remarks(trace, made.drawn)))


def _remarks(trace: DecisionTrace, drawn: int) -> list[str]:
    """What a reader of the figures must know."""
    told = [
        (drawn, "answers nobody ever got: their lengths were drawn from those that ended"),
        (trace.never, "requests that can never fit, and were left out"),
        (trace.dropped, "records that the log lost: the traffic was more than this"),
        (trace.torn, "lines that a crash cut short, and were left out"),
    ]
    return [f"{count:,} {what}" for count, what in told if count]


def _fault(text: str) -> Fault:
    """A fault as the option has it. Raises UsageError."""
    try:
        return parse_fault(text)
    except ValueError as error:
        raise click.UsageError(f"fault {text!r}: {error}.") from None
