"""What ``kvctl replay --log`` makes of a decision log and the options."""

from dataclasses import replace

from kvctl.cli.replay_asked import Asked, Staged, fault_of
from kvctl.sim.decision_trace import DecisionTrace, read_log
from kvctl.sim.log_scene import MEASURED, log_scene, measured_profile
from kvctl.sim.replay_faults import shifted
from kvctl.sim.replay_setup import SetupError, caps, engine_config, read_profile

POLICIES = ("forecast",)


def staged_log(asked: Asked) -> Staged:
    """The log's traffic. Raises ValueError or OSError with a text for the user."""
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
    faults = [fault_of(text) for text in asked.faults]
    scene = replace(made.scene, rows=shifted(made.scene.rows, faults, engine.max_model_len), faults=faults)
    if asked.cap is not None:
        scene = replace(scene, cap=caps(asked.cap))
    margin = 0.05 if trace.margin_ratio is None else trace.margin_ratio
    recorded = made.recorded if asked.rate is None else None
    return Staged(scene, POLICIES, f"{margin * 100:g}%", recorded, tuple(_remarks(trace, made.drawn)))


def _remarks(trace: DecisionTrace, drawn: int) -> list[str]:
    """What the reader of the figures must know."""
    told = [
        (drawn, "answers nobody ever got: their lengths were drawn from those that ended"),
        (trace.never, "requests that can never fit, and were left out"),
        (trace.dropped, "records that the log lost: the traffic was more than this"),
    ]
    return [f"{count:,} {what}" for count, what in told if count]
