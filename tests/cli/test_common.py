import subprocess
import sys

import pytest

from kvctl.cli.common import count, percent, span, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (5400, "1 h 30 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_unknown_is_not_zero() -> None:
    assert (count(None), percent(None)) == ("?", "?")
    assert (count(0), percent(0), count(45600.4), percent(0.125)) == ("0", "0%", "45,600", "12.5%")


def test_numbers_stand_right() -> None:
    shown = table([{"NAME": "a", "N": "1,000"}, {"NAME": "bcd", "N": "?"}])
    assert shown.splitlines() == ["NAME      N", "a     1,000", "bcd       ?"]
    assert table([]) == ""


def test_serve_takes_all_descriptors_that_it_may() -> None:
    script = (
        "import resource as r\nfrom kvctl.cli.serve import raise_file_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 512))\nraise_file_limit()\nprint(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["512", "512"]
