"""The run as a picture: budget, forecast and use of the forecast lane, and the use of the other two.

Plain SVG with colours that read on light and dark pages; nothing is fetched from anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from kvctl.cli.demo_run import LaneRun, Play
from kvctl.cli.demo_stage import BLOCK_SIZE, BLOCKS
from kvctl.cli.demo_summary import gated
from kvctl.sim.load import PHASES
from kvctl.sim.score import score

WIDTH, HEIGHT = 960, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 58, 62
_CAPACITY = (BLOCKS - 1) * BLOCK_SIZE
_COLOURS = {"none": "#b4690e", "static": "#7a7f87", "forecast": "#2f6fde"}
_BUDGET, _PEAK, _INK = "#c2334d", "#8a63d2", "#7a7f87"

Point = tuple[float, float]  # seconds, KV tokens


def write_picture(play: Play, path: Path) -> None:
    """Draw ``play`` into the file at ``path``. Raises OSError."""
    path.write_text(_picture(play), encoding="utf-8")


def _picture(play: Play) -> str:
    run = gated(play)
    parts = [*_frame(play), *_visits(play)]
    parts += [
        _line(play, _usage(each), _COLOURS[each.policy], 2.4 if each is run else 1.4) for each in play.lanes
    ]
    parts.append(_line(play, run.peaks, _PEAK, 1.4, dashes="3 3"))
    parts.append(_line(play, run.budget_trace, _BUDGET, 2.4))
    parts += [*_legend(), _caption(play)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    title = "<title>KV tokens over a run of kvctl demo: budget, forecast, and use by policy</title>"
    return "\n".join([head, title, *parts, "</svg>", ""])


def _usage(run: LaneRun) -> list[Point]:
    return [(at, share * _CAPACITY) for at, share in run.usage_trace]


def _scales(play: Play) -> tuple[Callable[[float], float], Callable[[float], float]]:
    def across(seconds: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(seconds / play.seconds, 1.0)

    def down(tokens: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(tokens / (_CAPACITY * 1.05), 1.0)

    return across, down


def _line(play: Play, points: Sequence[Point], colour: str, width: float, dashes: str = "") -> str:
    across, down = _scales(play)
    path = " ".join(f"{across(at):.1f},{down(tokens):.1f}" for at, tokens in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _text(x: float, y: float, words: str, *, colour: str = _INK, anchor: str = "start") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="13" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def _frame(play: Play) -> Iterable[str]:
    across, down = _scales(play)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = down(share * _CAPACITY)
        yield f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="{_INK}" stroke-opacity="0.25"/>'
        yield _text(_LEFT - 8, y + 4, f"{round(share * _CAPACITY):,}", anchor="end")
    for seconds in range(0, int(play.seconds) + 1, 5):
        yield _text(across(seconds), HEIGHT - _BOTTOM + 18, f"{seconds} s", anchor="middle")
    yield _text(14, _TOP - 12, "KV tokens (top line: capacity)")


def _visits(play: Play) -> Iterable[str]:
    """The burst and the neighbour, as shaded stretches."""
    across, _ = _scales(play)
    burst = (PHASES[0].until * play.seconds, PHASES[1].until * play.seconds)
    stretches = [(*burst, "burst: twice what the engine serves", 0.07, 26)]
    if play.neighbour_came_s is not None:
        left = play.neighbour_left_s or play.now_s
        stretches.append((play.neighbour_came_s, left, "a neighbour takes GPU memory", 0.12, 8))
    for start, end, words, opacity, y in stretches:
        x, width = across(start), across(end) - across(start)
        yield (
            f'<rect x="{x:.1f}" y="{_TOP}" width="{width:.1f}" height="{HEIGHT - _TOP - _BOTTOM}" '
            f'fill="{_INK}" fill-opacity="{opacity}"/>'
        )
        yield _text(x + 4, HEIGHT - _BOTTOM - y, words)


def _legend() -> Iterable[str]:
    entries = [
        ("budget", _BUDGET),
        ("forecast peak", _PEAK),
        *((f"in use, {policy}", colour) for policy, colour in _COLOURS.items()),
    ]
    for i, (words, colour) in enumerate(entries):
        x = _LEFT + i * 170
        yield f'<path d="M{x} {_TOP - 36}h22" stroke="{colour}" stroke-width="3"/>'
        yield _text(x + 28, _TOP - 32, words)


def _caption(play: Play) -> str:
    scores = {run.policy: score(run.outcomes, play.seconds) for run in play.lanes}
    each = ", ".join(f"{policy} {figures.good}" for policy, figures in scores.items())
    words = f"served in time, of the same {len(play.calls)} calls: {each}"
    return _text(_LEFT, HEIGHT - 14, words)
