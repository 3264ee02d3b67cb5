from typing import Any

import pytest
from pydantic import TypeAdapter

from kvctl.settings import types, units
from kvctl.settings.units import Address


def read(annotated: Any, given: object) -> Any:
    return TypeAdapter(annotated).validate_python(given)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("200ms", 0.2),
        ("30s", 30),
        ("10min", 600),
        ("10m", 600),
        ("1h30min", 5400),
        ("1h 30m", 5400),
        ("1.5s", 1.5),
        ("30", 30),
        (0.2, 0.2),
        (5, 5),
        (" 2 s ", 2),
        ("2d", 172800),
    ],
)
def test_durations(given: object, seconds: float) -> None:
    assert units.duration(given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given", ["", "s", "5 parsecs", "5S", "1,5s", "-5s", "nan", "inf", True, None, [], "1e999", "5s5"]
)
def test_no_durations(given: object) -> None:
    with pytest.raises(ValueError, match=r"is not|has "):
        units.duration(given)


@pytest.mark.parametrize(
    ("given", "amount"),
    [
        ("1GiB", 2**30),
        ("64 MiB", 2**26),
        ("1GB", 10**9),
        ("512", 512),
        (7, 7),
        ("0.5KiB", 512),
        ("9B", 9),
        ("1_024", 1024),
    ],
)
def test_sizes(given: object, amount: int) -> None:
    assert units.size(given) == amount


@pytest.mark.parametrize("given", ["1G", "1gib", "x", "", 1.5, True, "1.5", "GiB"])
def test_no_sizes(given: object) -> None:
    with pytest.raises(ValueError, match=r"is not|has the unit"):
        units.size(given)


@pytest.mark.parametrize(
    ("given", "share"), [("8%", 0.08), ("0.15", 0.15), (0.5, 0.5), ("12.5 %", 0.125), (".5", 0.5), (0, 0)]
)
def test_ratios(given: object, share: float) -> None:
    """F09: 0.15 and 15% are the same share."""
    assert units.ratio(given) == pytest.approx(share)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("0,15", "not a number"),
        ("15", "write 15%"),
        (12, "write 12%"),
        ("8,5%", "not a number"),
        ("%", "not a number"),
        ("", "not a number"),
        ("5 5%", "not a number"),
        ("nan", "not a number"),
        (float("nan"), "not a finite"),
        (10**400, "not a finite"),
        ("1e999", "unit 'e'"),
        (True, "not a finite"),
        (None, "not a finite"),
    ],
)
def test_no_ratios(given: object, text: str) -> None:
    """F09: 0,15 is refused with what to write instead."""
    with pytest.raises(ValueError, match=text):
        units.ratio(given)


@pytest.mark.parametrize("given", ["", "0x10", "1e3", "seven", "7.5", 7.5, None])
def test_no_whole_numbers(given: object) -> None:
    with pytest.raises(ValueError, match="int"):
        read(types.Count, given)


def test_whole_numbers() -> None:
    assert [read(types.Count, each) for each in ("16_384", "-3", 8)] == [16384, -3, 8]


@pytest.mark.parametrize(
    ("given", "host", "port", "shown"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, "127.0.0.1:8080"),
        ("[::1]:80", "::1", 80, "[::1]:80"),
        ("[0:0::1]:80", "::1", 80, "[::1]:80"),
        (":8080", "", 8080, ":8080"),
        ("localhost:0", "localhost", 0, "localhost:0"),
        ("gpu-3.rack_1.example:9", "gpu-3.rack_1.example", 9, "gpu-3.rack_1.example:9"),
    ],
)
def test_addresses(given: str, host: str, port: int, shown: str) -> None:
    assert units.address(given) == Address(host, port)
    assert str(units.address(given)) == shown
    assert units.address(shown) == Address(host, port)


@pytest.mark.parametrize(
    "given",
    ["::1:8080", "8080", "host", "a:65536", "a:-1", "a:", "http://a:80", "a b:80", "[x]:80", "[::g]:80", "",
     "[1:2]:80", 80, None, "a:²"],
)  # fmt: skip
def test_no_addresses(given: object) -> None:
    with pytest.raises(ValueError, match=r"host:port|At least 3 parts"):
        units.address(given)


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("http://h:8000//v1//", "http://h:8000"),
        ("http://h:8000/prefix/v1/", "http://h:8000/prefix"),
        ("https://[::1]:8000/a//b", "https://[::1]:8000/a/b"),
        ("http://h", "http://h"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("unix:///run/engine.sock", "unix:/run/engine.sock"),
        ("http+unix://%2Frun%2Fengine.sock", "unix:/run/engine.sock"),
        ("http+unix://%2Frun%2Fengine.sock/", "unix:/run/engine.sock"),
    ],
)
def test_every_way_to_write_a_base_url(given: str, base: str) -> None:
    """B28: with and without /v1, with and without a slash: one base."""
    assert units.base_url(given) == base


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("h:8000", "not a URL"),
        ("ftp://h", "not a URL"),
        ("http://", "not a URL"),
        ("http://h:x", "Port"),
        ("http://h:0", "not a URL"),
        ("http://h:99999", "Port"),
        ("http://[::1", "Invalid IPv6"),
        ("http://u:p@h", "more than"),
        ("http://h?a=1", "more than"),
        ("http://h#x", "more than"),
        ("http://h/v1/chat/completions", "names a route"),
        ("http://a b", "more than"),
        ("http://bücher", "more than"),
        ("", "not a URL"),
        (7, "not a URL"),
        ("unix:", "names no socket"),
        ("unix:///", "names no socket"),
        ("unix:engine.sock", "absolute"),
        ("unix:/run/e.sock?x", "names no socket"),
        ("unix:/" + "x" * 200, "too long"),
    ],
)
def test_no_base_urls(given: object, text: str) -> None:
    """B28: what is no base URL fails at the start, with a message."""
    with pytest.raises(ValueError, match=text):
        units.base_url(given)


@pytest.mark.parametrize(
    ("given", "cards"),
    [
        ("all", ("all",)),
        ("none", ("none",)),
        ("0,1", ("0", "1")),
        (0, ("0",)),
        ([0, "1"], ("0", "1")),
        ("GPU-aa11, MIG-bb22", ("GPU-aa11", "MIG-bb22")),
        ("0000:3b:00.0", ("0000:3b:00.0",)),
        ("3B:00.0", ("3B:00.0",)),
    ],
)
def test_cards(given: object, cards: tuple[str, ...]) -> None:
    assert read(types.Gpus, given) == cards


@pytest.mark.parametrize("given", ["", "first", "0,all", "0,0", [], "-1", [1.5], 2.5, "GPU_aa"])
def test_no_cards(given: object) -> None:
    with pytest.raises(ValueError, match=r"validation error"):
        read(types.Gpus, given)


@pytest.mark.parametrize("given", ["", "/llm", "/a/b", "/a.b"])
def test_prefixes(given: str) -> None:
    assert read(types.BasePath, given) == given


@pytest.mark.parametrize("given", ["/", "llm", "/llm/", "//a", "/a b", "/../x", "/a?b", "http://h/x", 7])
def test_no_prefixes(given: object) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read(types.BasePath, given)


@pytest.mark.parametrize(
    ("annotated", "given", "text"),
    [
        (types.WholePath, "~/x", "absolute path"),
        (types.WholePath, "", "absolute path"),
        (types.WholePath, "/a\nb", "absolute path"),
        (types.WholePath, 7, "path"),
        (types.SocketPath, "/" + "x" * 120, "at most 107"),
        (types.Text, " ", "pattern"),
        (types.Text, "a\nb", "pattern"),
        (types.Routes, "v1/x", "pattern"),
        (types.Routes, ["/a b"], "pattern"),
        (types.Routes, 7, "pattern"),
        (types.Switch, "maybe", "bool"),
        (types.OverloadStatus, "500", "429"),
        (types.OverloadStatus, "busy", "429"),
        (types.OverloadStatus, [429], "429"),
        (types.LogLevel, "loud", "debug"),
    ],
)
def test_other_refusals(annotated: Any, given: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(annotated, given)


@pytest.mark.parametrize(
    ("annotated", "given", "value"),
    [
        (types.LogLevel, "INFO", "info"),
        (types.OverloadStatus, "503", 503),
        (types.MaybeCount, "none", None),
        (types.MaybeDuration, "None", None),
        (types.Routes, " /a, /b,", ("/a", "/b")),
        (types.Text, " a b ", "a b"),
    ],
)
def test_other_values(annotated: Any, given: object, value: object) -> None:
    assert read(annotated, given) == value


@pytest.mark.parametrize("seconds", [0, 0.0005, 0.2, 1, 1.5, 59, 60, 90, 3600, 5400, 86400])
def test_durations_are_shown_as_they_are_read(seconds: float) -> None:
    assert units.duration(units.show_duration(seconds)) == pytest.approx(seconds)


@pytest.mark.parametrize("amount", [0, 1, 1023, 1024, 2**20 + 1, 2**30, 3 * 2**40])
def test_sizes_are_shown_as_they_are_read(amount: int) -> None:
    assert units.size(units.show_size(amount)) == amount
