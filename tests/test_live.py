"""What a reload puts in force is taken by somebody: each live setting, and each knob, moves something."""

from dataclasses import replace
from typing import Any

import pytest

from kvctl.core.decisions import Scales
from kvctl.core.events import Reconfigured, Scraped, Ticked
from kvctl.core.gate import Gate
from kvctl.core.overrides import Knob
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import RankSample
from kvctl.engines.vllm import VLLM
from kvctl.part_configs import gate_config, knob_defaults, with_overrides
from kvctl.settings.live import LIVE
from kvctl.settings.loading import load
from kvctl.settings.model import SPECS, Settings

ELSEWHERE = {
    "margin_min",  # bounds of the desk
    "margin_max",
    "override_ttl_max",
    "decision_log_size",  # the journal
    "log_level",
    "drain_timeout",  # read when it stops
}
OTHER: dict[str, Any] = {
    "margin": 0.1,
    "policy": "static",
    "enforce": 0.5,
    "max_context": 1000,
    "capacity_tokens": 5000,
    "capacity_force": True,
    "fallback_budget_tokens": 100,
    "ttft_target": 9.0,
    "itl_target": None,
    "max_num_seqs": 7,
    "retry_after_max": 9.0,
    "stale_after": 33.0,
    "stall_timeout": 44.0,
    "gpu_guard": 1,
    "prefix_sharing": "off",
    "queue_max_wait": 3.0,
    "queue_max_requests": 3,
    "queue_max_bytes": 3000,
    "large_requests": "reserve",
    "large_requests_share": 0.3,
    "large_requests_max_wait": 9.0,
}


def settings(**more: Any) -> Settings:
    return load(None, {"KVCTL_ENGINE_URL": "http://h:1"}).model_copy(update=more)


def config(given: Settings) -> GateConfig:
    return replace(gate_config(given, VLLM()), jitter_seed=0.0)


@pytest.mark.parametrize("key", sorted(LIVE - ELSEWHERE))
def test_a_live_setting_reaches_the_gate(key: str) -> None:
    assert config(settings()) != config(settings(**{key: OTHER[key]}))


def test_no_other_keys_are_live() -> None:
    assert set(LIVE) <= set(SPECS)


@pytest.mark.parametrize("knob", list(Knob))
def test_a_knob_reaches_the_gate_over_its_setting(knob: Knob) -> None:
    given = settings()
    assert config(with_overrides(given, {})) == config(given)
    assert config(with_overrides(given, {knob: OTHER[knob.value]})) != config(given)
    assert knob in knob_defaults(given)


def scales(gate: Gate) -> Scales:
    gate.handle(Ticked(), 1.0)
    return gate.scales()


def test_a_gate_takes_another_configuration() -> None:
    gate = Gate(config(settings(margin=0.0)))
    sample = RankSample(rank="0", at=0.0, kv_usage_ratio=0.0, capacity_tokens=1000, capacity_exact=True)
    gate.handle(Scraped((sample,), 0.0), 0.0)
    assert (scales(gate).budget_tokens, scales(gate).capacity_tokens) == (1000, 1000)
    told = gate.handle(Reconfigured(config(settings(margin=0.2))), 1.0)
    assert scales(gate).budget_tokens == 800
    assert len(told) == 1
    forced = settings(margin=0.0, capacity_tokens=500, capacity_force=True, policy="static")
    gate.handle(Reconfigured(config(forced)), 1.0)
    assert (scales(gate).capacity_tokens, scales(gate).policy) == (500, "static")
    gate.handle(Reconfigured(config(settings(margin=0.0))), 1.0)
    assert scales(gate).capacity_tokens == 1000
