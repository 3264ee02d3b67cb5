"""The work of ``kvctl replay`` between its options and its output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvctl.cli.replay_asked import Asked, staged
from kvctl.settings.units import ratio
from kvctl.sim.replay import Run, Scene
from kvctl.sim.replay_policies import WITH_MARGIN, Spec, find_best, parse_policy, run_policy
from kvctl.sim.replay_score import Target, document, recorded_document

SEARCH_RUNS = 20  # about as many as finding the best limit takes
RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs by the name they go under, in the order asked for."""

    scene: Scene
    target: Target
    runs: Mapping[str, Run]
    recorded: Run | None = None  # what the log says of the same callers
    remarks: Sequence[str] = ()

    def document(self) -> dict[str, Mapping[str, float | None]]:
        """The figures as JSON values; null: unknown, or nothing of the kind happened."""
        found = {} if self.recorded is None else {RECORDED: recorded_document(self.recorded, self.target)}
        return found | {name: document(run, self.target) for name, run in self.runs.items()}


def compare(asked: Asked) -> Comparison:
    """Run all. Raises UsageError, ValueError or OSError with a text for the user."""
    stage = staged(asked)
    try:
        specs = named_specs(
            asked.policies or stage.policies, asked.margins or stage.margin, asked.prefix_sharing
        )
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    scene = replace(stage.scene, ttft_s=asked.ttft, itl_s=asked.itl)
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
    return Comparison(scene, target, runs, stage.recorded, stage.remarks)


def named_specs(policies: Sequence[str], margins: str, sharing: str = "auto") -> dict[str, Spec]:
    """Policies by their names in the output; the gate's own once for each margin and way to share."""
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


def _bar() -> Progress:
    """A progress bar on standard error, shown only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal, transient=True
    )
