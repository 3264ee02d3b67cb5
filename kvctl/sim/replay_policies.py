"""Policies by name.

``forecast``, ``static``, ``none``, ``concurrency=N``, ``kv-gauge``, ``engine-queue=N``, ``past-future`` and
``clairvoyant``. For N, ``best`` searches the limit with the highest goodput.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvctl.core.outcomes import Policy
from kvctl.core.supply import GateConfig
from kvctl.sim.policies import Concurrency, Door, KvGauge
from kvctl.sim.policies_core import Clairvoyant, CoreGate
from kvctl.sim.policies_past_future import PastFuture
from kvctl.sim.replay import Run, Scene, replay
from kvctl.sim.replay_score import Target, figures

WITH_LIMIT = ("concurrency", "engine-queue")
WITH_MARGIN = ("forecast", "static", "clairvoyant")


@dataclass(frozen=True, slots=True)
class Spec:
    """A policy and its limit. ``limit`` None: it has none, or the best is searched (``best``)."""

    name: str
    limit: int | None = None
    margin_ratio: float = 0.05
    prefix_sharing: bool = True

    @property
    def to_search(self) -> bool:
        """Whether the limit has to be found first."""
        return self.name in WITH_LIMIT and self.limit is None


def parse_policy(text: str) -> Spec:
    """``NAME`` or ``NAME=N``. Raises ValueError with the reason."""
    name, equals, value = text.partition("=")
    if name not in _MAKERS:
        raise ValueError(f"no policy {name!r}; there are {', '.join(_MAKERS)}")
    if (name in WITH_LIMIT) != bool(equals):
        raise ValueError(f"{name}=N or {name}=best" if name in WITH_LIMIT else f"{name} takes no value")
    if not equals or value == "best":
        return Spec(name)
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name}: {value!r} is not a number of requests")
    return Spec(name, int(value))


def make_door(spec: Spec, scene: Scene) -> Door:
    """The policy, fresh, for one run."""
    return _MAKERS[spec.name](spec, scene)


def _config(spec: Spec, scene: Scene, policy: Policy) -> GateConfig:
    return GateConfig(
        policy=policy,
        margin_ratio=spec.margin_ratio,
        jitter_seed=_jitter(scene),
        prefix_sharing=spec.prefix_sharing,
        ttft_target_s=scene.ttft_s,
        itl_target_s=scene.itl_s,
    )


def _core(spec: Spec, scene: Scene) -> Door:
    return CoreGate(_config(spec, scene, Policy(spec.name)))


def _clairvoyant(spec: Spec, scene: Scene) -> Door:
    return Clairvoyant(_config(spec, scene, Policy.FORECAST))


def _past_future(spec: Spec, scene: Scene) -> Door:  # noqa: ARG001 - one signature
    return PastFuture(capacity_tokens(scene), scene.engine.max_model_len, scene.seed)


def _limited(spec: Spec, scene: Scene) -> Door:  # noqa: ARG001 - one signature
    if spec.limit is None:
        raise ValueError(f"{spec.name}: the limit is still to be found")
    return Concurrency(spec.limit)


_MAKERS: Mapping[str, Callable[[Spec, Scene], Door]] = MappingProxyType(
    {
        "forecast": _core,
        "static": _core,
        "none": lambda spec, scene: Door(),  # noqa: ARG005
        "concurrency": _limited,
        "kv-gauge": lambda spec, scene: KvGauge(),  # noqa: ARG005
        "engine-queue": _limited,
        "past-future": _past_future,
        "clairvoyant": _clairvoyant,
    }
)


def capacity_tokens(scene: Scene) -> int:
    """Usable KV tokens of the scene's engine."""
    return (scene.engine.blocks - 1) * scene.engine.block_size


def _jitter(scene: Scene) -> float:
    return scene.seed * 0.3819660112501051 % 1.0


COARSE = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def find_best(spec: Spec, scene: Scene, target: Target, done: Callable[[], None] = lambda: None) -> Spec:
    """The limit with the highest goodput: a coarse walk until it falls for good, then its neighbourhood."""
    goodput: dict[int, float] = {}

    def measure(limit: int) -> float:
        if limit not in goodput:
            run = replay(scene, make_door(replace(spec, limit=limit), scene))
            goodput[limit] = figures(run, target).goodput_rps
            done()
        return goodput[limit]

    falls = 0
    for limit in COARSE:
        falls = falls + 1 if measure(limit) < max(goodput.values()) else 0
        if falls > 2:
            break
    step = max(_best(goodput) // 4, 1)
    while step:
        middle = _best(goodput)
        measure(max(middle - step, 1))
        measure(middle + step)
        step = step // 2 if _best(goodput) == middle else step
    return replace(spec, limit=_best(goodput))


def _best(goodput: dict[int, float]) -> int:
    return max(goodput, key=lambda limit: (goodput[limit], -limit))


def run_policy(spec: Spec, scene: Scene, progress: Callable[[int], None] | None = None) -> Run:
    """One policy through a scene."""
    return replay(scene, make_door(spec, scene), progress)
