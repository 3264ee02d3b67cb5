"""``kvctl replay`` from the outside."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvctl.cli.main import cli

KEYS = {
    "goodput_rps",
    "goodput_frac",
    "completed",
    "refused",
    "preemptions",
    "recomputed_frac",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p99_s",
    "kv_usage_mean",
    "retry_success_frac",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [f"{n * 0.2:.1f},{300 + n % 7 * 90},{20 + n % 9 * 30},t{n % 3}" for n in range(120)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["t_s,input_tokens,output_tokens,client_id", *lines]))
    return path


def test_json_has_every_policy_under_the_name_asked_for(trace: Path) -> None:
    names = [
        "forecast",
        "static",
        "none",
        "concurrency=9",
        "kv-gauge",
        "engine-queue=9",
        "past-future",
        "clairvoyant",
    ]
    options = [word for name in names for word in ("--policy", name)]
    done = CliRunner().invoke(
        cli, ["replay", str(trace), "--capacity-tokens", "8000", *options, "-o", "json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == names
    assert all(set(one) == KEYS for one in found.values())
    assert all(one["completed"] + one["refused"] == 120 for one in found.values())


def test_margins_are_compared_side_by_side(trace: Path) -> None:
    options = ["--policy", "forecast", "--policy", "none", "--margin", "5%,0.3", "--capacity-tokens", "6000"]
    done = CliRunner().invoke(cli, ["replay", str(trace), "--rate", "20", *options, "-o", "json"])
    found = json.loads(done.stdout)
    assert list(found) == ["forecast 5%", "forecast 0.3", "none"]
    assert found["forecast 5%"]["kv_usage_mean"] > found["forecast 0.3"]["kv_usage_mean"]


def test_the_best_limit_is_named(trace: Path) -> None:
    options = ["--policy", "concurrency=best", "--capacity-tokens", "6000", "--rate", "20", "-o", "json"]
    found = json.loads(CliRunner().invoke(cli, ["replay", str(trace), *options]).stdout)
    assert re.fullmatch(r"concurrency=\d+", next(iter(found)))


def test_the_table_shows_figures_and_usage(trace: Path, tmp_path: Path) -> None:
    html = tmp_path / "chart.html"
    done = CliRunner().invoke(cli, ["replay", str(trace), "--capacity-tokens", "6000", "--html", str(html)])
    assert done.exit_code == 0, done.output
    assert "GOOD/S" in done.output
    assert "forecast: KV usage" in done.output
    page = html.read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert not re.search(r"<script|https?:|@import|url\(|src=", page)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "magic"], "no policy 'magic'"),
        (["--margin", "150%"], "150%"),
        (["--margin", "100%"], "leaves nothing"),
        (["--cap", "some"], "a cap is exact, none or a number"),
        (["--fault", "flood"], "fault 'flood'"),
        (["--fault", "shift=x"], "write KIND=VALUE@SECONDS"),
        (["--fault", "shift=1e308"], "out of range"),
        (["--fault", "bypass=1e9"], "at most 1"),
        (["--fault", "freeze=10@nan"], "out of range"),
        (["--margin", "5%,"], "margin ''"),
        (["--prefix-sharing", "on"], "prefix sharing is auto or off"),
    ],
)
def test_a_value_that_makes_no_sense_is_mistyped(trace: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(cli, ["replay", str(trace), *options])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--start", "5000"], "none from 5000"),
        (["--engine-profile", "h900"], "no profile 'h900'"),
        (["--context", "50"], "none from 0"),
    ],
)
def test_what_the_trace_cannot_give_is_told(trace: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(cli, ["replay", str(trace), *options])
    assert done.exit_code == 1
    assert words in done.stderr


@pytest.mark.parametrize("option", ["--rate", "--ttft", "--itl"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_what_is_no_number_is_no_option(trace: Path, option: str, value: str) -> None:
    done = CliRunner().invoke(cli, ["replay", str(trace), option, value])
    assert done.exit_code == 2
    assert option in done.stderr


def test_a_page_that_cannot_be_written_costs_no_figures(trace: Path, tmp_path: Path) -> None:
    place = tmp_path / "nowhere" / "page.html"
    arguments = ["replay", str(trace), "--policy", "none", "-o", "json", "--html", str(place)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1
    assert list(json.loads(done.stdout)) == ["none"]
    assert done.stderr == f"kvctl: --html {place}: No such file or directory\n"


def test_a_measured_profile_is_read_from_a_file(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"base_s": 0.01, "prefill_token_s": 1e-5, "decode_sequence_s": 1e-5, "kv_token_s": 1e-8})
    )
    arguments = ["replay", str(trace), "--engine-profile", str(path), "--policy", "none"]
    assert "on mine," in CliRunner().invoke(cli, arguments).output
    path.write_text(json.dumps({"profile": json.loads(path.read_text()), "compared": []}))
    assert "on mine," in CliRunner().invoke(cli, arguments).output
    path.write_text("{}")
    assert "not a profile" in CliRunner().invoke(cli, arguments).stderr


def log_of(folder: Path) -> Path:
    """A decision log of sixty answers and some refusals."""
    lines = []
    for n in range(90):
        at, lease = n * 0.25, f"L{n}"
        decision = {
            "v": 1,
            "type": "decision",
            "time": stamp(at),
            "engine": "one",
            "lease": lease,
            "id": lease,
            "route": "chat",
            "model": "m",
            "tenant": "a",
            "prompts": [200 + n],
            "n": 1,
            "asked_output": 400,
            "stream": True,
            "capacity_tokens": 8000,
            "margin_ratio": 0.08,
            "leases": 1,
            "decision": "admit" if n % 3 else "reject_later",
            "retry_after_s": None if n % 3 else 1.0,
            "waited_s": 0.0,
        }
        lines.append(decision)
        if n % 3:
            end = {"v": 1, "type": "end", "time": stamp(at + 2.0), "engine": "one", "lease": lease}
            figures = {"end": "finished", "seconds": 2.0, "first_token_s": 0.2, "output_tokens": 60 + n}
            lines.append(end | figures)
    lines.append({"v": 1, "type": "dropped", "records": 4})
    path = folder / "decisions.jsonl"
    path.write_text('{"v": 1, "type": "deci\n' + "".join(json.dumps(line) + "\n" for line in lines))
    return path


def stamp(at: float) -> str:
    return datetime.fromtimestamp(1_800_000_000 + at, UTC).isoformat(timespec="milliseconds")


def test_a_decision_log_is_replayed_with_other_margins(tmp_path: Path) -> None:
    arguments = ["replay", "--log", str(log_of(tmp_path)), "--margin", "5%,8%,12%"]
    done = CliRunner().invoke(cli, [*arguments, "-o", "json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["recorded", "forecast 5%", "forecast 8%", "forecast 12%"]
    assert all(set(one) == KEYS for one in found.values())
    assert found["recorded"]["completed"] == 60
    assert found["recorded"]["preemptions"] is None
    shown = CliRunner().invoke(cli, arguments).output
    assert "on measured, 8,000 KV tokens" in shown
    assert "30 answers nobody ever got" in shown
    assert "4 records that the log lost" in shown
    assert "1 lines that a crash cut short" in shown


def test_a_log_says_what_its_margin_and_limits_were(tmp_path: Path) -> None:
    log, html = log_of(tmp_path), tmp_path / "page.html"
    options = ["--policy", "static", "--engine-profile", "8b-24g", "--html", str(html)]
    done = CliRunner().invoke(cli, ["replay", "--log", str(log), *options, "-o", "json"])
    assert list(json.loads(done.stdout)) == ["recorded", "static"]
    assert "recorded" in html.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ([], 2, "a trace or --log"),
        (["--log", "LOG", "TRACE"], 2, "one of them"),
        (["TRACE", "--engine", "one"], 2, "--engine goes with --log"),
        (["--log", "LOG", "--engine", "two"], 1, "no engine 'two'"),
        (["--log", "TRACE"], 1, "trace.csv, line 1"),
        (["--log", "LOG", "--shared-prefix", "100"], 1, "does not say how prompts begin"),
        (["--log", "LOG", "--start", "500"], 1, "fewer than two"),
        (["--log", "LOG", "--context", "50"], 1, "none from 0"),
    ],
)
def test_what_makes_no_sense_with_a_log_is_told(
    trace: Path, tmp_path: Path, options: list[str], status: int, words: str
) -> None:
    places = {"LOG": str(log_of(tmp_path)), "TRACE": str(trace)}
    done = CliRunner().invoke(cli, ["replay", *(places.get(word, word) for word in options)])
    assert done.exit_code == status
    assert words in done.stderr


def test_each_form_of_output_is_what_was_asked_for(trace: Path) -> None:
    options = ["replay", str(trace), "--policy", "static", "--requests", "20"]
    forms = ("table", "json", "jsonl")
    table, whole, line = (CliRunner().invoke(cli, [*options, "-o", form]) for form in forms)
    assert "static" in table.stdout
    assert json.loads(whole.stdout) == json.loads(line.stdout)
    assert (len(line.stdout.splitlines()), len(whole.stdout.splitlines()) > 1) == (1, True)
