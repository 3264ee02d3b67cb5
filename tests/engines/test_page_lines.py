"""Lines of a metrics page, of which mostly the values move: read as the library reads them."""

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvctl.engines.base import PageError
from kvctl.engines.page import Reading, read_page
from tests.effort import examples

PAGES = sorted((Path(__file__).parent.parent / "conformance" / "pages").glob("vllm-*.prom"))
NAMES = frozenset({"a", "a_total", "b"})


def by_library(line: str) -> list[Reading]:
    """Raises whatever the library does, and OverflowError where a number is too large."""
    families = text_string_to_metric_families(line)
    return [
        Reading(each.name, each.labels, float(each.value)) for family in families for each in family.samples
    ]


def same(one: Reading, other: Reading) -> bool:
    equal = one.value == other.value or (math.isnan(one.value) and math.isnan(other.value))
    return (one.name, one.labels, equal) == (other.name, other.labels, True)


def agree(line: str) -> None:
    try:
        expected = by_library(line)
    except Exception:  # noqa: BLE001 - whatever it is, the line is broken
        with pytest.raises(PageError):
            read_page(line, NAMES)
        return
    read = read_page(line, NAMES).readings
    assert len(read) == len(expected)
    assert all(map(same, read, expected)), line


HEADS = st.sampled_from(
    [
        *(
            "a",
            "b ",
            "a_total",
            'a{x="1"}',
            'a{x="} 3"}',
            'a {x="1",}',
            'a{x="a\\"b\\\\"} ',
            "a{}",
            'a{x="1"',
        ),
        *('a{x="1"} 5', 'a{x="1"} 5 #', 'a{x="1"} 5 # {trace="y"}', "a 5", "a\t", 'a{x="1"}\t', "a  ", "a #"),
    ]
)
VALUES = st.sampled_from(
    [
        "0",
        "1.0",
        "17",
        "1e+06",
        "2.5e-3",
        "NaN",
        "+Inf",
        "-1",
        "1_0",
        "0x1",
        "",
        "1.",
        ".5",
        "1e",
        "٣",
        "# x",
        "5 7",
    ]
) | st.floats(min_value=0, allow_nan=False, allow_infinity=False).map(repr)


@given(HEADS, st.sampled_from([" ", "", "  ", "\t"]), VALUES, VALUES, st.sampled_from(["", "", " ", "\r"]))
@example('a{x="1"} 5', " ", "1.0", "2.0", "")
@example("a", " ", "1.0", "9" * 400, "")
@example("a 0.8414709848078965", " ", "1.0", "1700000000000", "")
@example("a", " ", "1e+99", "1e+400", "")
@settings(max_examples=examples(500), deadline=None)
def test_a_line_says_what_the_library_says(head: str, gap: str, first: str, then: str, end: str) -> None:
    """Also the second time, when what stands before its value is known."""
    for value in (first, then):
        line = f"{head}{gap}{value}{end}"
        if line.replace("{", " ").split()[0] in NAMES:
            agree(line.strip())


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_whose_values_moved_says_what_the_library_says(page: Path) -> None:
    lines = [
        line for line in page.read_text(encoding="utf-8").split("\n") if line and not line.startswith("#")
    ]
    moved = [f"{head} {number}.0" for number, head in enumerate(line.rpartition(" ")[0] for line in lines)]
    for told in (lines, moved):
        expected = [reading for line in told for reading in by_library(line)]
        read = read_page("\n".join(told), frozenset(reading.name for reading in expected)).readings
        assert len(read) == len(expected)
        assert all(map(same, read, expected))
