"""What ``kvctl replay`` does between its options and its output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvctl.cli.replay import USUAL_POLICIES
from kvctl.settings.units import ratio
from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_faults import Fault, parse_fault
from kvctl.sim.replay_policies import WITH_MARGIN, Spec, find_best, parse_policy, run_policy
from kvctl.sim.replay_score import Target, document
from kvctl.sim.replay_setup import engine_config, make_scene, read_profile
from kvctl.sim.trace import read_trace

SEARCH_RUNS = 20  # about what finding the best limit takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options as given."""

    trace: Path
    policies: Sequence[str] = ()
    profile: str = "8b-24g"
    capacity_tokens: int | None = None
    context: int | None = None
    rate: float | None = None
    cap: str = "4096"
    margins: str = "5%"
    start: int = 0
    requests: int | None = 1500
    ttft: float = 2.0
    itl: float = 0.1
    retries: int = 2
    faults: Sequence[str] = ()
    prefix_caching: bool | None = None
    shared_prefix: int = 0
    prefix_sharing: str = "auto"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs by the name they go under, in the order asked for."""

    scene: Scene
    target: Target
    runs: Mapping[str, Run]

    def document(self) -> dict[str, Mapping[str, float | None]]:
        """The figures as JSON values."""
        return {name: document(run, self.target) for name, run in self.runs.items()}


def compare(asked: Asked) -> Comparison:
    """Run all. Raises ValueError or OSError with a text for the user."""
    specs = named_specs(asked.policies or USUAL_POLICIES, asked.margins, asked.prefix_sharing)
    scene = replace(_scene(asked), ttft_s=asked.ttft, itl_s=asked.itl)
    target = Target(ttft_s=asked.ttft, itl_s=asked.itl)
    runs: dict[str, Run] = {}
    with _bar() as bar:
        for name, spec in specs.items():
            run_name, runs_spec = name, spec
            if spec.to_search:
                task = bar.add_task(f"{name}: searching", total=SEARCH_RUNS)
                runs_spec = find_best(spec, scene, target, lambda task=task: bar.advance(task))  # type: ignore[misc]
                bar.remove_task(task)
                run_name = f"{spec.name}={runs_spec.limit}"
            task = bar.add_task(run_name, total=len(scene.rows))
            runs[run_name] = run_policy(
                runs_spec,
                scene,
                lambda done, task=task: bar.update(task, completed=done),  # type: ignore[misc]
            )
            bar.update(task, completed=len(scene.rows))
    return Comparison(scene, target, runs)


def named_specs(policies: Sequence[str], margins: str, sharing: str = "auto") -> dict[str, Spec]:
    """Policies under the names that the output gives them; the gate's own once a margin and way to share."""
    ratios = {text.strip(): _margin(text) for text in margins.split(",")}
    ways = {text.strip(): _sharing(text) for text in sharing.split(",")}
    specs: dict[str, Spec] = {}
    for text in policies:
        spec = parse_policy(text)
        if spec.name not in WITH_MARGIN:
            specs[text] = spec
            continue
        for margin, value in ratios.items():
            for way, shares in ways.items():
                name = text if len(ratios) == 1 else f"{text} {margin}"
                name = name if len(ways) == 1 else f"{name}, sharing {way}"
                specs[name] = replace(spec, margin_ratio=value, prefix_sharing=shares)
    return specs


def _sharing(text: str) -> bool:
    if text.strip() not in ("auto", "off"):
        raise ValueError(f"prefix sharing is auto or off, not {text.strip()!r}")
    return text.strip() == "auto"


def _margin(text: str) -> float:
    try:
        value = ratio(text.strip())
    except ValueError as error:
        raise ValueError(f"margin {text.strip()!r} {error}") from None
    if not 0.0 <= value < 1.0:
        raise ValueError(f"margin {text.strip()!r} leaves nothing to admit")
    return value


def _scene(asked: Asked) -> Scene:
    return make_scene(
        read_trace(asked.trace),
        engine_config(
            read_profile(asked.profile),
            asked.capacity_tokens,
            asked.context,
            prefix_caching=asked.shared_prefix > 0 if asked.prefix_caching is None else asked.prefix_caching,
        ),
        cap=asked.cap,
        rate=asked.rate,
        start=asked.start,
        requests=asked.requests,
        retries=asked.retries,
        seed=asked.seed,
        faults=[_fault(text) for text in asked.faults],
        shared_prefix=asked.shared_prefix,
    )


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise ValueError(f"fault {text!r}: {error}") from None


def _bar() -> Progress:
    """On standard error, and only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal, transient=True
    )
