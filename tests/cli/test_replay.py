"""``kvctl replay`` from the outside."""

import json
import re
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
    assert all(set(one) >= KEYS for one in found.values())
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
        (["--start", "5000"], "none from 5000"),
        (["--engine-profile", "h900"], "no profile 'h900'"),
        (["--fault", "flood"], "fault 'flood'"),
        (["--context", "50"], "none from 0"),
    ],
)
def test_what_makes_no_sense_is_told(trace: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(cli, ["replay", str(trace), *options])
    assert done.exit_code == 1
    assert words in done.stderr


def test_a_measured_profile_is_read_from_a_file(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"base_s": 0.01, "prefill_token_s": 1e-5, "decode_sequence_s": 1e-5, "kv_token_s": 1e-8})
    )
    arguments = ["replay", str(trace), "--engine-profile", str(path), "--policy", "none"]
    assert "on mine," in CliRunner().invoke(cli, arguments).output
    path.write_text("{}")
    assert "not a profile" in CliRunner().invoke(cli, arguments).stderr
