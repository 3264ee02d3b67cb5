"""From a trace and a handful of numbers to a scene."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvctl.sim.beginnings import with_system_prompt
from kvctl.sim.profiles import PROFILES, SECONDS, Profile
from kvctl.sim.replay import Scene
from kvctl.sim.replay_faults import Fault, shifted
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.trace import Row, TraceError, at_rate, that_fit, window

BLOCK = 16
USUAL_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class Pool:
    """What goes with a profile unless said otherwise: KV tokens, and tokens computed in a step at most."""

    capacity_tokens: int
    batched_tokens: int


POOLS: Mapping[str, Pool] = MappingProxyType(
    {
        "tiny-cpu": Pool(32_000, 2048),
        "1.5b-shared": Pool(32_000, 2048),
        "8b-24g": Pool(48_000, 2048),
        "8b-h200": Pool(800_000, 8192),
    }
)


class SetupError(ValueError):
    """Numbers that make no scene."""


def read_profile(text: str) -> Profile:
    """A profile by name, or a JSON file with the coefficients of one, as measured. Raises SetupError.

    The file holds them at its top or, as a calibration prints it, under ``profile``.
    """
    if text in PROFILES:
        return PROFILES[text]
    path = Path(text)
    if not path.is_file():
        raise SetupError(f"no profile {text!r} and no such file; there are {', '.join(PROFILES)}")
    wanted = [name for name in SECONDS if not name.startswith("request")]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found = found.get("profile", found)
        seconds = {name: float(found[name] if name in wanted else found.get(name, 0.0)) for name in SECONDS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{path}: not a profile ({error}); it needs {', '.join(sorted(wanted))}") from None
    if min(seconds.values()) < 0.0 or seconds["base_s"] <= 0.0:
        raise SetupError(f"{path}: step times must be positive")
    return Profile(name=path.stem, about=f"measured, {path.name}", **seconds)


def engine_config(
    profile: Profile,
    capacity_tokens: int | None = None,
    context_tokens: int | None = None,
    *,
    prefix_caching: bool = False,
) -> EngineConfig:
    """The simulated engine; its context is at most its pool."""
    pool = POOLS.get(profile.name, POOLS["tiny-cpu"])
    capacity = capacity_tokens or pool.capacity_tokens
    blocks = capacity // BLOCK
    if blocks < 2:
        raise SetupError(f"a pool of {capacity} tokens is no pool")
    return EngineConfig(
        profile=profile,
        blocks=blocks + 1,  # the null block
        block_size=BLOCK,
        max_model_len=min(context_tokens or USUAL_CONTEXT, blocks * BLOCK),
        max_num_batched_tokens=pool.batched_tokens,
        prefix_caching=prefix_caching,
    )


def caps(text: str) -> Callable[[Row], int | None]:
    """What callers send as their output limit: ``exact``, ``none``, or a number. Raises SetupError."""
    if text == "exact":
        return lambda row: row.output_tokens
    if text == "none":
        return lambda row: None  # noqa: ARG005 - one signature
    if not text.isdecimal() or int(text) < 1:
        raise SetupError(f"a cap is exact, none or a number of tokens, not {text!r}")
    limit = int(text)
    return lambda row: limit  # noqa: ARG005 - one signature


def make_scene(
    rows: Sequence[Row],
    engine: EngineConfig,
    *,
    cap: str = "4096",
    rate: float | None = None,
    start: int = 0,
    requests: int | None = 1500,
    retries: int = 2,
    seed: int = 1,
    faults: Sequence[Fault] = (),
    shared_prefix: int = 0,
) -> Scene:
    """A stretch of a trace in front of an engine; what exceeds its context is left out. Raises SetupError.

    ``shared_prefix``: tokens of a system prompt that goes before every prompt.
    """
    rows = with_system_prompt(rows, shared_prefix)
    try:
        chosen = at_rate(window(that_fit(rows, engine.max_model_len), start, requests), rate)
    except TraceError as error:
        raise SetupError(f"{error} that fit a context of {engine.max_model_len} tokens") from None
    if len(chosen) < 2 or chosen[-1].at_s <= 0.0:
        raise SetupError("a replay needs two requests at two times")
    return Scene(
        rows=shifted(chosen, faults, engine.max_model_len),
        engine=engine,
        cap=caps(cap),
        retries=retries,
        seed=seed,
        faults=faults,
    )
