"""What people read first."""

import pytest

from kvctl.core.budget import Budget
from kvctl.core.outcomes import SERVING, EngineState
from kvctl.core.sentence import state_means, tick_sentence


@pytest.mark.parametrize("state", EngineState)
def test_where_nobody_is_served_that_is_said_before_any_figure(state: EngineState) -> None:
    said = tick_sentence(
        Budget(tokens=900, capacity=1000, margin_ratio=0.1, pressure={}), 0.0, 0, state, draining=False
    )
    assert said.startswith("budget ") is (state in SERVING)
    if state not in SERVING:
        assert said.startswith(f"{state_means(state)}; ")
        assert "requests get 503; budget " in said
