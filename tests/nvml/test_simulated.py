import json
from pathlib import Path

import pytest

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.gpu.simulated import CardFull, FollowedCard, SimulatedCard


async def test_memory_moves_and_is_seen() -> None:
    card = SimulatedCard(1000, 700)
    card.take(250)
    (sample,) = (await card.read()).samples
    assert (sample.total_bytes, sample.free_bytes, sample.used_bytes) == (1000, 50, 950)
    card.release(950)
    assert (await card.read()).samples[0].free_bytes == 1000


def test_more_than_there_is_cannot_be_taken_or_given_back() -> None:
    card = SimulatedCard(1000, 700)
    for size in (301, -1):
        with pytest.raises(CardFull):
            card.take(size)
    with pytest.raises(ValueError, match="in use"):
        card.release(701)
    assert card.free_bytes == 300


@pytest.mark.parametrize(("total", "used"), [(0, 0), (10, 11), (10, -1)])
def test_a_card_that_cannot_be(total: int, used: int) -> None:
    with pytest.raises(ValueError, match="cannot have"):
        SimulatedCard(total, used)


async def test_another_process_follows_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    card, follower = SimulatedCard(1000, 700, path=path), FollowedCard(path)
    assert (await follower.read()).samples[0].free_bytes == 300
    card.take(100)
    assert (await follower.read()).samples[0].free_bytes == 200
    card.lose()
    (sample,) = (await follower.read()).samples
    assert sample.lost
    assert sample.absent["free_bytes"] is Absence.LOST
    card.lose(lost=False)
    assert (await follower.read()).samples[0].free_bytes == 200


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"', " " * 5000, "\xff"])
async def test_a_file_that_is_no_card_is_unparsable(tmp_path: Path, text: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(text, encoding="latin-1")
    reading = await FollowedCard(path).read()
    assert reading.fault is SourceFault.UNPARSABLE
    assert str(path) in reading.detail


async def test_no_file_is_a_fault(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert (await FollowedCard(path).read()).fault is SourceFault.FAILED


@pytest.mark.parametrize(
    "state",
    [{}, {"total_bytes": 10}, {"total_bytes": 0, "free_bytes": 0}, {"total_bytes": 1, "free_bytes": 2},
     {"total_bytes": "10", "free_bytes": 1}, {"total_bytes": 10.5, "free_bytes": 1}],
)  # fmt: skip
async def test_odd_numbers_are_unknown(tmp_path: Path, state: dict[str, object]) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(state))
    (sample,) = (await FollowedCard(path).read()).samples
    assert sample.free_bytes is None
    assert sample.absent["free_bytes"] is Absence.OUT_OF_RANGE
