"""The load of the demo: who calls when, with what prompt, cap and true answer length. Pure and seeded.

An afternoon at a self-hosted chat service, in fast motion. Arrivals are Poisson (open loop: callers do not
wait for one another) with a rate by phase: a calm start below capacity, a burst well past it, a calm end.
Prompts and answers are log-normal, as the public traces of chat services are: right-skewed, answers a few
times shorter than prompts. Callers send caps of 2,048 to 4,096 tokens, as client libraries and agents do,
and use a fraction: that gap is what a worst-case gate pays for.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.sim.lengths import LogNormal

PROMPTS = LogNormal(mean=650, sigma=0.7, low=32, high=3000)
ANSWERS = LogNormal(mean=150, sigma=0.7, low=8, high=1500)
CAPS = (2048, 3072, 4096)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run: up to ``until`` (share of the whole), at ``rate`` requests a second."""

    name: str
    until: float
    rate: float


PHASES = (Phase("calm", 0.10, 5.0), Phase("burst", 0.70, 20.0), Phase("calm", 0.80, 5.0))
"""After the last phase nothing arrives: what is in flight may finish until the end."""

NEIGHBOUR = (0.38, 0.55)
"""When somebody else's process takes memory of the card, and when it gives it back, as shares of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One caller's request. ``output_tokens`` is the true length, which nobody in front may know."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cap_tokens: int


def phase_at(share: float, phases: Sequence[Phase] = PHASES) -> Phase | None:
    """The phase in force at a share of the run; None once arrivals are over."""
    return next((phase for phase in phases if share < phase.until), None)


def calls(seconds: float, seed: int, phases: Sequence[Phase] = PHASES) -> list[Call]:
    """All calls of a run of ``seconds``, in order of arrival."""
    source = random.Random(seed)  # noqa: S311 - a reproducible load, not a secret
    made: list[Call] = []
    start = 0.0
    for phase in phases:
        end, at = phase.until * seconds, start
        while (at := at + source.expovariate(phase.rate)) < end:
            made.append(_call(at, source))
        start = end
    return made


def _call(at: float, source: random.Random) -> Call:
    return Call(
        at_s=at,
        prompt_tokens=PROMPTS.draw(source),
        output_tokens=ANSWERS.draw(source),
        cap_tokens=source.choice(CAPS),
    )
