"""What came of forecasts."""

from math import inf

import pytest

from kvctl.core.curves import Curve
from kvctl.core.ledger import Ledger
from kvctl.core.outcomes import EndReason
from kvctl.core.residuals import AHEAD, FEWEST_LOOKS, NODE, Residuals
from tests.core.test_ledger import lease


def flat(mean: float, sd: float) -> Curve:
    """The same at each node. With one sequence's spread, apart and together are one."""
    nodes = NODE + 3
    return Curve([mean] * nodes, [sd] * nodes, [sd * sd] * nodes, [inf] * nodes)


def looked(ledger: Ledger, forecast: Curve, seconds: int = 200) -> Residuals:
    """One lease of all moves, and as much is held each time."""
    residuals = Residuals()
    for at in range(seconds):
        for one in ledger:
            one.output_tokens = 0.0
        residuals.tick(ledger, forecast, float(2 * at))
        first = next(iter(ledger))
        first.output_tokens += AHEAD
        residuals.tick(ledger, forecast, float(2 * at) + 0.5)
    return residuals


def crowd(size: int = 10) -> Ledger:
    """Leases that hold 64 tokens each, and the first 64 more when it has made them."""
    ledger = Ledger()
    for number in range(size):
        ledger.open(lease(f"r{number}", prompt=60))
    return ledger


@pytest.mark.parametrize(
    ("mean", "sd", "exceeded"), [(704.0, 0.0, 0.0), (660.0, 30.0, 0.0), (660.0, 10.0, 1.0)]
)
def test_what_lies_above_mean_and_two_deviations_exceeds_the_forecast(
    mean: float, sd: float, exceeded: float
) -> None:
    residuals = looked(crowd(), flat(mean, sd))
    assert residuals.exceeded_ratio == exceeded
    assert residuals.error_ratio == pytest.approx((704 - mean) / mean)


def test_who_came_later_has_no_part_and_who_ended_holds_nothing() -> None:
    ledger, residuals = crowd(), Residuals()
    stays = lease("stays", prompt=60)
    ledger.open(stays)
    for at in range(200):
        stays.output_tokens = float(AHEAD * (at + 2))  # beyond its cap, so it holds the same
        residuals.tick(ledger, flat(512.0, 0.0), float(at))
        for number in range(5):
            if at % 2 == 0:
                ledger.end(f"r{number}", EndReason.FINISHED, float(at))
                ledger.open(lease(f"late{at}-{number}", prompt=60))
            else:
                ledger.end(f"late{at - 1}-{number}", EndReason.FINISHED, float(at))
                ledger.open(lease(f"r{number}", prompt=60))
    assert residuals.exceeded_ratio == 0.0
    assert residuals.error_ratio == pytest.approx(0.0)


def test_unknown_is_not_zero() -> None:
    """Few looks, few leases, and a forecast that does not reach that far say nothing."""
    assert Residuals().exceeded_ratio is None
    assert looked(crowd(), flat(640.0, 0.0), FEWEST_LOOKS // 2).error_ratio is None
    assert looked(crowd(3), flat(1.0, 0.0)).exceeded_ratio is None
    assert looked(crowd(), Curve([1.0], [0.0], [0.0], [1.0])).exceeded_ratio is None


def test_a_look_is_due_by_tokens_whatever_the_pace() -> None:
    """Behind long prompts the measured pace was off by half, and 17 % of all looks came too late."""
    ledger, residuals = crowd(), Residuals()
    first = next(iter(ledger))
    for at in range(100):
        residuals.tick(ledger, flat(640.0, 0.0), 100.0 * at)
        first.output_tokens = min(at, AHEAD - 1)
    assert residuals.exceeded_ratio is None
    for number in range(10):
        ledger.end(f"r{number}", EndReason.FINISHED, 1e4)
    residuals.tick(ledger, flat(640.0, 0.0), 1e4)
    assert residuals.exceeded_ratio is None  # looked at, once all had ended
