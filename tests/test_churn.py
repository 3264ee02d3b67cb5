"""The churn of ``tests.bench.churn`` in its short form: a daemon as a process, faults on both sides."""

from tests.bench.churn import run


async def test_nothing_is_left_behind_by_callers_and_engines_that_misbehave() -> None:
    report = await run(seconds=5, count=16, seed=7)
    assert not list(report.wrongs(judge_memory=False)), report
    assert report.statuses["200"] > 0
    assert len(report.acts) >= 5
