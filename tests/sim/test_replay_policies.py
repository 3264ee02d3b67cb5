"""The gates that the replay compares with, each by its rule."""

from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample
from kvctl.sim.policies import KvGauge, Offer
from kvctl.sim.policies_core import Clairvoyant, CoreGate
from kvctl.sim.policies_past_future import PastFuture, peak


def offer(number: int, prompt: int = 100, output: int = 50, cap: int | None = 1000) -> Offer:
    return Offer(id=str(number), tenant="", prompt=prompt, cap=cap, true_output=output)


def page(usage: float, waiting: int) -> RankSample:
    return RankSample(rank="0", at=0.0, kv_usage_ratio=usage, waiting=waiting)


def test_peak_is_the_highest_over_all_ends() -> None:
    assert peak([]) == 0
    assert peak([(100, 50)]) == 150
    assert peak([(100, 50), (400, 10)]) == 100 + 400 + 2 * 10
    assert peak([(100, 500), (400, 10)]) == 600


def brute_peak(batch: list[tuple[int, int]]) -> int:
    longest = max(left for _, left in batch)
    return max(sum(held + step for held, left in batch if step <= left) for step in range(longest + 1))


def test_peak_agrees_with_step_by_step() -> None:
    for shape in range(40):
        batch = [(7 * shape % (n + 13) * 9, (n * 31 + shape * 17) % 83) for n in range(1, 9)]
        assert peak(batch) == brute_peak(batch)


def test_the_gauge_rule_goes_by_the_last_page() -> None:
    door = KvGauge()
    for usage, waiting, admitted in ((0.8, 5, True), (0.81, 0, False), (0.2, 6, False), (0.5, 0, True)):
        door.page(page(usage, waiting), 0.0, 0.0)
        assert door.arrived(offer(1), 0.0).admitted is admitted


def test_past_future_learns_how_long_answers_are() -> None:
    fresh, taught = PastFuture(8000, 4096, seed=1), PastFuture(8000, 4096, seed=1)
    for number in range(200):
        taught.arrived(offer(number), 0.0)
        taught.ended(str(number), 20, 0.0, finished=True, broken=False)
    admitted = [
        sum(door.arrived(offer(1000 + n, cap=20), 0.0).admitted for n in range(200))
        for door in (fresh, taught)
    ]
    assert admitted[1] > 2 * admitted[0]
    assert 40 <= admitted[1] <= 0.95 * 8000 / 100


def test_clairvoyant_judges_by_true_lengths_and_not_by_the_forecast() -> None:
    """Caps of 1,000 and answers of 10: who knows that fills the pool, who does not keeps most of it free."""
    admitted = {}
    for door in (CoreGate(GateConfig()), Clairvoyant(GateConfig())):
        door.described(EngineInfo(models=("sim",), context_tokens=8192), 0.0)
        full = RankSample(rank="0", at=0.0, kv_usage_ratio=0.0, capacity_tokens=16_000, capacity_exact=True)
        door.page(full, 0.0, 0.0)
        door.tick(0.1)
        offers = [offer(n, output=10, cap=1000) for n in range(200)]
        admitted[type(door)] = sum(door.arrived(one, 0.1).admitted for one in offers)
    assert admitted[Clairvoyant] > 1.5 * admitted[CoreGate]
    assert 0.9 * 15_200 <= admitted[Clairvoyant] * (100 + 10 + 15) <= 15_200
