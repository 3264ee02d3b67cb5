"""The text that the page is made of, against what the Prometheus library makes of the same."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from kvctl.metrics.exposition import head, number, series
from kvctl.metrics.instruments import Counter, Histogram
from kvctl.metrics.spec import counter, histogram

LABELS = {"zone": (), "engine": ()}
VALUES = [("a", "http://b"), ('say "no"\n', "back\\slash"), ("größer", "{},= #")]
HELP = "Two words,\nand a back\\slash."


def theirs(made: object) -> list[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(made)  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#") and "_created" not in line)


def test_a_counter_reads_as_theirs_does() -> None:
    spec = counter("kvctl_words_total", HELP, LABELS)
    ours, their = Counter(spec), TheirCounter("kvctl_words", HELP, list(LABELS), registry=None)
    for number_of, labels in enumerate(VALUES):
        for _ in range(number_of + 1):
            ours.add(*labels)
            their.labels(*labels).inc()
    assert sorted("".join(ours.lines()).splitlines()) == theirs(their)


def test_a_histogram_reads_as_theirs_does() -> None:
    spec = histogram("kvctl_seconds", HELP, (0.5, 1.0, 2.5), LABELS)
    ours = Histogram(spec)
    their = TheirHistogram("kvctl_seconds", HELP, list(LABELS), registry=None, buckets=spec.buckets)
    for labels in VALUES:
        for seconds in (0.1, 0.5, 2.0, 99.0):
            ours.observe(seconds, *labels)
            their.labels(*labels).observe(seconds)
    assert sorted("".join(ours.lines()).splitlines()) == theirs(their)


def test_a_head_says_help_and_type_in_a_line_each() -> None:
    spec = counter("kvctl_words_total", HELP, LABELS)
    (family,) = text_string_to_metric_families(head(spec))
    assert (family.documentation, family.type) == (HELP, "counter")


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0.0"), (3, "3.0"), (True, "1.0"), (1e22, "1e+22"), (float("inf"), "+Inf"), (float("nan"), "NaN")],
)
def test_numbers_are_written_so_that_prometheus_reads_them(value: float, written: str) -> None:
    assert number(value) == written


def test_a_series_without_labels_is_its_name() -> None:
    assert series("kvctl_up", (), ()) == "kvctl_up "


def test_what_appears_while_the_page_is_made_harms_nobody() -> None:
    ours = Counter(counter("kvctl_words_total", HELP, LABELS))
    ours.add("a", "b")
    lines = ours.lines()
    ours.add("c", "d")
    assert next(lines).endswith(" 1.0\n")
    ours.add("e", "f")
    assert len(list(lines)) <= 1
    assert len(list(ours.lines())) == 3
