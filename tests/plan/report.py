"""The planner against the logs, in figures: ``python -m tests.plan.report`` (``-v``: every figure)."""

import sys
from collections import Counter
from statistics import median

from tests.plan.cases import Case, Figure, Interval, figures, interval, load, weights_of

say = print


def main(arguments: list[str]) -> None:
    cases = load()
    found = [(figure, "available_kv_gib" in case.logged) for case in cases for figure in figures(case)]
    given = [figure for figure, memory in found if memory]
    _told("figures, memory for KV given", given)
    _told("figures without memory (sizes, blocks, ratios)", [each for each, memory in found if not memory])
    say(f"cases: {len(cases)}, with memory given: {len({figure.case for figure in given})}")
    for figure, _ in found:
        if not figure.inside or "-v" in arguments:
            word = "inside " if figure.inside else "OUTSIDE"
            planned = f"{figure.low:,.2f} to {figure.high:,.2f} ({figure.error:+.2%})"
            say(f"  {word} {figure.case} {figure.name}: logged {figure.logged:,}, plan {planned}")
    _weights(cases)
    for source, weights in (("as logged", True), ("from config", False)):
        rows = [each for case in cases if (each := interval(case, weights=weights)) is not None]
        _intervals(f"memory interval, weights {source}", rows, arguments)


def _told(title: str, found: list[Figure]) -> None:
    inside = sum(figure.inside for figure in found)
    say(f"{title}: {inside} of {len(found)} inside their rounding ({inside / len(found):.1%})")
    for kind, number in sorted(Counter(figure.kind for figure in found).items()):
        good = sum(figure.inside for figure in found if figure.kind == kind)
        say(f"    {kind:24} {good:3} of {number:3}")


def _weights(cases: list[Case]) -> None:
    rows = [(case, found) for case in cases if (found := weights_of(case)) is not None]
    inside = sum(low <= logged <= high for _, (low, _, high, logged) in rows)
    distance = median(abs(logged / likely - 1) for _, (_, likely, _, logged) in rows)
    say(f"weights from config: {inside} of {len(rows)} inside, median distance {distance:.1%}")
    for case, (low, likely, high, logged) in rows:
        if not low <= logged <= high:
            say(f"  OUTSIDE {case.id}: logged {logged:.2f}, {low:.2f} / {likely:.2f} / {high:.2f} GiB")


def _intervals(title: str, found: list[Interval], arguments: list[str]) -> None:
    inside = sum(each.inside for each in found)
    width = median(each.width for each in found)
    say(f"{title}: {inside} of {len(found)} inside ({inside / len(found):.1%}), median width {width:.1%}")
    for each in found:
        if not each.inside or "-v" in arguments:
            word = "inside " if each.inside else "OUTSIDE"
            planned = f"{each.low:.2f} / {each.likely:.2f} / {each.high:.2f} GiB, width {each.width:.0%}"
            say(f"  {word} {each.case}: logged {each.logged:.2f}, {planned}")


if __name__ == "__main__":
    main(sys.argv[1:])
