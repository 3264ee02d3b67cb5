"""What only a real card can show. Run with -s to see the table; skipped where there is none."""

import pytest

from kvctl.core.outcomes import SourceFault
from tests.gpu.report import Report, run, source

ABSENT = {SourceFault.LIBRARY_MISSING, SourceFault.NO_DEVICE, SourceFault.NO_PERMISSION}


async def test_the_cards_of_this_machine() -> None:
    probe = source()
    reading = await probe.read()
    await probe.close()
    if reading.fault in ABSENT:
        pytest.skip(f"no card here ({reading.fault}: {reading.detail})")
    report = Report()
    first = await run(report)
    assert first.fault is None
    assert report.failures == 0
