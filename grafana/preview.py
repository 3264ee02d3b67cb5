"""A picture of the overview's first row, from what a real Prometheus has: no Grafana is needed for it.

``python -m grafana.preview http://127.0.0.1:9090 120 > row.svg`` draws the last 120 seconds. The renderer is
this file: panels, queries, units and widths are the dashboard's own, the drawing is plain SVG, simpler than
Grafana's.
"""

import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from grafana.boards import BOARDS
from grafana.generate import dashboard, expression
from grafana.rules import Panel, Query

WIDTH, UNIT = 1200, 32  # pixels of the picture, and of one row of Grafana's grid
PALETTE = ("#4a5568", "#c53030", "#2b6cb0", "#276749", "#975a16", "#553c9a")
STEPS = 240
_SHOWN = {
    "percentunit": lambda v: f"{v * 100:.1f}%",
    "s": lambda v: f"{v:.3g} s",
    "reqps": lambda v: f"{v:.3g}/s",
}
Ask = Callable[[Query], list["Line"]]


@dataclass(frozen=True, slots=True)
class Line:
    """One series: its legend and its points (0..1 of the time, value)."""

    legend: str
    points: tuple[tuple[float, float], ...]


def asking(base: str, seconds: float, rate: str) -> Ask:
    """Asks a Prometheus for the last ``seconds``, with windows of ``rate``."""
    end = time.time()

    def ask(query: Query) -> list[Line]:
        expr = expression(query).replace("$__rate_interval", rate)
        for variable in ("$job", "$instance", "$engine"):
            expr = expr.replace(variable, ".*")
        given = {"query": expr, "start": end - seconds, "end": end, "step": seconds / STEPS}
        url = f"{base}/api/v1/query_range?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - the caller's own Prometheus
            found = json.load(answer)["data"]["result"]
        return [_line(query.legend, series, end - seconds, seconds) for series in found]

    return ask


def _line(legend: str, series: dict[str, object], start: float, seconds: float) -> Line:
    labels, values = series["metric"], series["values"]
    if not isinstance(labels, dict) or not isinstance(values, list):
        raise TypeError("this is no answer of Prometheus")
    for name, value in labels.items():
        legend = legend.replace("{{" + name + "}}", str(value))
    points = [((float(at) - start) / seconds, float(value)) for at, value in values]
    return Line(legend, tuple((at, value) for at, value in points if math.isfinite(value)))


def picture(ask: Ask) -> str:
    """The row as SVG."""
    board = BOARDS[0]
    grid = {panel["title"]: panel["gridPos"] for panel in dashboard(board)["panels"]}
    places = [(panel, grid[panel.title]) for panel in board.rows[0].panels]
    height = max(at["y"] + at["h"] for _, at in places) * UNIT - UNIT
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _rect(0, 0, WIDTH, height, "#f4f5f5")]
    for panel, at in places:
        box = _Box(
            at["x"] * WIDTH / 24 + 3, (at["y"] - 1) * UNIT + 3, at["w"] * WIDTH / 24 - 6, at["h"] * UNIT - 6
        )
        lines = [line for query in panel.queries for line in ask(query) if line.points]
        parts += _panel(panel, box, lines)
    return "".join([*parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    w: float
    h: float


def _panel(panel: Panel, box: _Box, lines: Sequence[Line]) -> Iterator[str]:
    yield _rect(box.x, box.y, box.w, box.h, '#fff" stroke="#d8dadd')
    yield _text(box.x + 8, box.y + 18, panel.title, "font-weight='bold'")
    if not lines:
        yield _text(box.x + 8, box.y + box.h / 2, panel.empty or "no data")
        return
    inner = _Box(box.x + 46, box.y + 30, box.w - 56, box.h - 30 - 22)
    draw = {"stat": _stat, "state-timeline": _timeline}.get(panel.kind, _series)
    yield from draw(panel, inner, lines)


def _series(panel: Panel, box: _Box, lines: Sequence[Line]) -> Iterator[str]:
    top = max(value for line in lines for _, value in line.points) * 1.1 or 1.0
    for part in (0, 0.5, 1):
        y = box.y + box.h * (1 - part)
        yield f'<path d="M{box.x:.0f} {y:.0f}h{box.w:.0f}" stroke="#e3e5e8"/>'
        yield _text(box.x - 4, y + 4, _value(panel, top * part), "text-anchor='end' font-size='10'")
    for line, color in zip(lines, PALETTE * len(lines), strict=False):
        at = " L".join(f"{box.x + x * box.w:.1f} {box.y + box.h * (1 - v / top):.1f}" for x, v in line.points)
        yield f'<path d="M{at}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    yield from _legend(box, [line.legend for line in lines])


def _timeline(_: Panel, box: _Box, lines: Sequence[Line]) -> Iterator[str]:
    for line, color in zip(lines, PALETTE * len(lines), strict=False):
        for x, _at in line.points:
            yield _rect(box.x + x * box.w, box.y, box.w / STEPS + 0.5, box.h - 6, color)
    yield from _legend(box, [line.legend for line in lines])


def _stat(panel: Panel, box: _Box, lines: Sequence[Line]) -> Iterator[str]:
    value = lines[0].points[-1][1]
    color = [color for least, color in panel.thresholds if least is None or value >= least][-1]
    yield _text(box.x - 30, box.y + box.h / 2 + 12, _value(panel, value), f"font-size='28' fill='{color}'")


def _legend(box: _Box, names: Sequence[str]) -> Iterator[str]:
    x = box.x - 36
    scale = min(1.0, (box.w + 46) / (sum(26 + 6.2 * len(name) for name in names) or 1.0))
    for name, color in zip(names, PALETTE * len(names), strict=False):
        yield _rect(x, box.y + box.h + 9, 10 * scale, 3, color)
        yield _text(x + 14 * scale, box.y + box.h + 15, name, f"font-size='{11 * scale:.1f}'")
        x += (26 + 6.2 * len(name)) * scale


def _value(panel: Panel, value: float) -> str:
    return _SHOWN.get(panel.unit, lambda v: f"{v:,.0f}")(value)


def _rect(x: float, y: float, w: float, h: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    fill = "" if "fill=" in more else " fill='#24292e'"
    return f'<text x="{x:.0f}" y="{y:.0f}"{fill} {more}>{escape(text)}</text>'


if __name__ == "__main__":
    sys.stdout.write(
        picture(asking(sys.argv[1], float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "1m"))
    )
