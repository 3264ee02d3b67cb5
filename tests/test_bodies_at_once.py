"""Many large bodies at once, through a daemon as a process, scaled down from ``tests.bench.bodies``."""

from tests.bench.bodies import MIB, run


async def test_bodies_beyond_the_memory_for_them_are_refused_and_the_rest_served() -> None:
    bounds = {"MAX_BODY_BYTES": "8MiB", "MAX_BODY_BYTES_TOTAL": "32MiB", "HEADER_TIMEOUT": "60s"}
    report = await run(32, 4 * MIB, bounds)
    statuses = report["statuses"]
    assert set(statuses) <= {"200", "503"}, report
    assert statuses["200"] >= 8
    assert sum(statuses.values()) == 32
    assert report["rss_peak_above"] < 120 * MIB, report  # all at once would be 128 MiB, parsed 384
