"""A comparison as one HTML file: the figures and a chart of pool usage for each policy. Nothing is loaded."""

from collections.abc import Iterable, Mapping
from html import escape

from kvctl.cli.replay_run import Comparison
from kvctl.sim.replay import Point, Run

WIDTH, HEIGHT, LEFT, BOTTOM = 920, 170, 44, 22

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --faint: #8a94a3; --paper: #fff; --grid: #e3e7ec;
  --usage: #2463c9; --area: #2463c922; --budget: #c2571a; --waiting: #8b3fa8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --faint: #97a2b2; --paper: #14181e;
  --grid: #2c333d; --usage: #6aa2ff; --area: #6aa2ff22; --budget: #ff9a5c; --waiting: #cf8bea; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .25rem .5rem; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--grid); } .usage { fill: none; stroke: var(--usage); stroke-width: 1.5; }
.area { fill: var(--area); } .budget { fill: none; stroke: var(--budget); stroke-dasharray: 5 3; }
.waiting { fill: none; stroke: var(--waiting); } h2 { margin: 1.5rem 0 0; font-size: 1rem; }
.key span { margin-right: 1.2rem; } .key .u { color: var(--usage); } .key .b { color: var(--budget); }
.key .w { color: var(--waiting); }
"""


def page(found: Comparison) -> str:
    """The whole document."""
    scene = found.scene
    capacity = (scene.engine.blocks - 1) * scene.engine.block_size
    charts = "".join(_chart(name, run, scene.seconds, capacity) for name, run in found.runs.items())
    about = (
        f"{len(scene.rows):,} requests at {(len(scene.rows) - 1) / scene.seconds:.3g}/s,"
        f" {scene.engine.profile.name}, {capacity:,} KV tokens; good: first token within"
        f" {found.target.ttft_s:g} s, then {found.target.itl_s * 1000:g} ms a token"
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvctl replay</title><style>{_STYLE}</style><h1>kvctl replay</h1><p>{escape(about)}</p>"
        f"{_table(found.document())}"
        '<p class="key"><span class="u">KV usage</span><span class="b">budget</span>'
        '<span class="w">waiting in the engine (full height: its most)</span>'
        "<span>seconds of the run below</span></p>"
        f"{charts}</html>\n"
    )


def _table(results: Mapping[str, Mapping[str, float | None]]) -> str:
    names = list(next(iter(results.values())))
    head = "".join(f"<th>{escape(name).replace('_', '_<wbr>')}</th>" for name in ("policy", *names))
    rows = "".join(
        f"<tr><td>{escape(policy)}</td>{''.join(f'<td>{_number(one[name])}</td>' for name in names)}</tr>"
        for policy, one in results.items()
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _chart(name: str, run: Run, seconds: float, capacity: int) -> str:
    usage = _line(run.points, seconds, [point.usage for point in run.points])
    budget = [point for point in run.points if point.budget is not None]
    lines = "".join(
        f"<line class='grid' x1='{LEFT}' x2='{WIDTH}' y1='{_y(s):.1f}' y2='{_y(s):.1f}'/>"
        for s in (0, 0.5, 1)
    )
    labels = "".join(f"<text x='4' y='{_y(s) + 4:.1f}'>{s:.0%}</text>" for s in (0, 0.5, 1))
    times = "".join(
        f"<text x='{_x(share, 1.0):.0f}' y='{HEIGHT - 4}' text-anchor='{anchor}'>{share * seconds:.0f}</text>"
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    )
    ends = [_x(point.at_s, seconds) for point in run.points[-1:] + run.points[:1]]
    floor = " ".join(f"{x:.1f},{_y(0):.1f}" for x in ends)
    shapes = [
        f"<polygon class='area' points='{usage} {floor}'/>",
        f"<polyline class='usage' points='{usage}'/>",
    ]
    if budget:
        points = _line(budget, seconds, [(point.budget or 0) / capacity for point in budget])
        shapes.append(f"<polyline class='budget' points='{points}'/>")
    most = max((point.waiting for point in run.points), default=0)
    if most:
        points = _line(run.points, seconds, [point.waiting / most for point in run.points])
        shapes.append(f"<polyline class='waiting' points='{points}'/>")
    title = f"<h2>{escape(name)}</h2>" + (f"<small>at most {most:,} waiting</small>" if most else "")
    picture = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(name)}'>"
    return f"{title}{picture}{lines}{labels}{times}{''.join(shapes)}</svg>"


def _line(points: Iterable[Point], seconds: float, shares: Iterable[float]) -> str:
    pairs = zip(points, shares, strict=True)
    return " ".join(f"{_x(point.at_s, seconds):.1f},{_y(share):.1f}" for point, share in pairs)


def _x(at_s: float, seconds: float) -> float:
    return LEFT + (WIDTH - LEFT) * at_s / seconds


def _y(share: float) -> float:
    return 6 + (HEIGHT - BOTTOM - 6) * (1 - min(max(share, 0.0), 1.0))
