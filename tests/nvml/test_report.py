"""The hardware report, over the fake library, so that it runs when a card is there for a few minutes."""

from tests.gpu.report import Report, run
from tests.nvml.conftest import Install
from tests.nvml.fake_library import FakeCard, cards, installed


async def test_the_report_of_two_cards(install: Install) -> None:
    library = install(*cards(2))
    library.cards[1].errors["nvmlDeviceGetTotalEccErrors"] = 3
    lines: list[str] = []
    report = Report(lines.append)
    reading = await run(report, apart=False)
    text = "\n".join(lines)
    assert len(reading.samples) == 2
    assert report.failures == 0, text
    assert "absent: not_supported" in text
    assert "nvmlDeviceGetMemoryInfo_v2" in text
    assert "580.95.05" in text
    assert library.open == 0


async def test_a_contradiction_is_a_line_that_begins_with_fail(install: Install) -> None:
    install(FakeCard("GPU-12345678-a"), FakeCard("GPU-12345678-b"))  # the short UUID means neither
    lines: list[str] = []
    report = Report(lines.append)
    await run(report, apart=False)
    assert report.failures == 2
    assert sum(line.startswith("FAIL gpus = GPU-12345678") for line in lines) == 2


async def test_no_card_is_one_line() -> None:
    lines: list[str] = []
    with installed(None):
        await run(Report(lines.append), apart=False)
    assert len(lines) == 1
    assert lines[0].startswith("no card")
