"""The wire forms, to the letter."""

import asyncio
from math import isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.fleet.agent_check import AgentServer, agent_line
from kvctl.fleet.load_report import RequestRate, load_report
from kvctl.fleet.overlay import overlay
from kvctl.fleet.standing import Standing


def standing(**changed: object) -> Standing:
    given: dict[str, object] = {
        "serving": True,
        "draining": False,
        "reason": "",
        "headroom_tokens": 21000,
        "budget_tokens": 30000,
        "forecast_ratio": 0.3,
        "usage_ratio": 0.25,
        "running": 4,
        "waiting": 2,
    }
    return Standing(**given | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, b"up ready 70%\n"),
        ({"headroom_tokens": 0}, b"up ready 1%\n"),
        ({"draining": True}, b"up drain 1%\n"),
        ({"serving": False, "reason": "unreachable"}, b"down#unreachable\n"),
        ({"serving": False, "draining": True}, b"up drain 1%\n"),
    ],
)
def test_agent_line(changed: dict[str, object], line: bytes) -> None:
    assert agent_line(standing(**changed)) == line


async def test_a_check_gets_one_line_and_the_end() -> None:
    server = AgentServer("127.0.0.1", 0, standing)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await reader.read() == b"up ready 70%\n"
        writer.close()
    finally:
        await server.close()


def test_load_report() -> None:
    assert load_report(standing(), 12.5) == (
        "TEXT application_utilization=0.3,rps_fractional=12.5,eps=0,"
        "named_metrics.kv_cache_usage_perc=0.25,named_metrics.kv_headroom_tokens=21000"
    )
    assert "nan" not in load_report(standing(usage_ratio=nan), 0.0)
    assert "rps_fractional=0.01," in load_report(standing(), 0.0), "0 would void the report"


@given(st.floats(), st.one_of(st.none(), st.floats()), st.floats(min_value=0, allow_infinity=False))
def test_a_report_never_holds_what_voids_it(forecast: float, usage: float | None, rate: float) -> None:
    report = load_report(standing(forecast_ratio=forecast, usage_ratio=usage), rate)
    for part in report.removeprefix("TEXT ").split(","):
        name, _, value = part.partition("=")
        assert name.removeprefix("named_metrics.").isidentifier()
        assert isfinite(float(value))


def test_rate_over_the_window() -> None:
    rate = RequestRate()
    for tenth in range(50):
        rate.admitted(tenth / 10)
    assert rate.per_second(5.0) == 5.0
    assert rate.per_second(60.0) == 0.0


PAGE = b"""\
# HELP vllm:num_requests_waiting Requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0125
vllm:num_requests_running{engine="0",model_name="tiny"} 7.0
"""


def test_overlay_changes_two_series_and_nothing_else() -> None:
    seen = overlay(PAGE, standing()).splitlines()
    before = PAGE.splitlines()
    assert seen[2] == b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 5.0'
    assert seen[4] == b'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.300000'
    assert [line for at, line in enumerate(seen) if at not in (2, 4)] == [
        line for at, line in enumerate(before) if at not in (2, 4)
    ]
