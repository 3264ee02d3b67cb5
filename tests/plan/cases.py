"""Published start-up logs as cases: a config, flags, and the figures that the engine logged.

A figure counts as reproduced when the plan's value over the rounding interval of what was logged as input
(GiB with two digits: +-0.005) meets the rounding interval of the logged figure.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.plan import GIB, Flags, Given, Model, Plan, card_of, describe, make_plan
from kvctl.plan.accounting import VllmAccounting
from kvctl.plan.vllm import pool_of_blocks
from kvctl.plan.weighing import Ranks, weight_bytes

FILE = Path(__file__).with_name("cases.jsonl")
HALF_DIGIT = 0.005


@dataclass(frozen=True, slots=True)
class Case:
    """One start-up log."""

    id: str
    kind: str
    engine: str
    version: str
    gpu: str | None
    config: dict[str, Any]
    flags: dict[str, Any]
    logged: dict[str, Any]
    spec: dict[str, Any] | None
    cpu_offload_gib: float | None = None

    @property
    def model(self) -> Model:
        return describe(self.config, self.id)

    def plan(self, given: Given, **changes: Any) -> Plan:
        values = {"max_model_len": None, **self.flags, **changes}
        flags = Flags(engine=self.engine, version=self.version, **values)  # type: ignore[arg-type]
        return make_plan(
            self.model, flags, given, None if self.spec is None else describe(self.spec, "draft")
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One logged figure and the plan's interval for it."""

    case: str
    kind: str
    name: str
    logged: float
    low: float
    high: float
    half: float = 0.0

    @property
    def inside(self) -> bool:
        return self.low <= self.logged + self.half and self.high >= self.logged - self.half

    @property
    def error(self) -> float:
        """Relative distance of the logged figure from the interval's middle."""
        middle = (self.low + self.high) / 2
        return middle / self.logged - 1


def load() -> list[Case]:
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return [
        Case(
            row["id"], row["kind"], row["engine"], row["version"], row["gpu"], row["config"], row["flags"],
            row["logged"], row.get("spec_config"), row.get("cpu_offload_gib"),
        )
        for row in rows
    ]  # fmt: skip


def figures(case: Case) -> Iterator[Figure]:
    """Every logged figure of the case that a plan can be held against, except the memory interval."""
    if case.engine == "sglang":
        yield from _sglang(case)
        return
    yield from _layout(case)
    if "available_kv_gib" in case.logged:
        yield from _with_memory(case)
    else:
        yield from _without_memory(case)


_READ: tuple[tuple[str, float, Callable[[Plan], float]], ...] = (
    ("kv_tokens", 0.0, lambda plan: plan.pool.kv_tokens_logged),
    ("num_gpu_blocks", 0.0, lambda plan: plan.pool.num_blocks),
    ("max_concurrency", HALF_DIGIT, lambda plan: plan.pool.max_concurrency),
    ("est_max_model_len", 0.0, lambda plan: plan.max_model_len_fits),
)


def _with_memory(case: Case) -> Iterator[Figure]:
    gib, logged = case.logged["available_kv_gib"], case.logged
    low, high = (case.plan(Given(available_gib=each)) for each in (gib - HALF_DIGIT, gib + HALF_DIGIT))
    for name, half, value in _READ:
        if name in logged:
            yield Figure(case.id, case.kind, name, logged[name], value(low), value(high), half)


def _layout(case: Case) -> Iterator[Figure]:
    """Figures that need no memory: bytes of a CPU block, the inflated block, the memory of one request."""
    plan = case.plan(Given(available_gib=1.0))
    assert isinstance(plan.accounting, VllmAccounting)
    layout = plan.accounting.layout
    if "needed_gib" in case.logged:
        one_stage = plan.setup.version.since(0, 16)  # before, the engine named the need of all stages
        block = layout.bytes_per_block if one_stage else layout.bytes_of_all_stages
        needed = layout.blocks_for(plan.setup.max_model_len, plan.setup) * block / GIB
        yield Figure(case.id, case.kind, "needed_gib", case.logged["needed_gib"], needed, needed, HALF_DIGIT)
    for name, value in (
        ("attention_block", layout.attention_block),
        ("num_cpu_blocks", plan.details.get("cpu_blocks")),
    ):
        if name in case.logged and isinstance(value, int):
            yield Figure(case.id, case.kind, name, case.logged[name], value, value)


def _without_memory(case: Case) -> Iterator[Figure]:
    """Concurrency from the logged tokens or blocks, and tokens from the logged blocks."""
    logged = case.logged
    plan = case.plan(Given(available_gib=1.0))
    assert isinstance(plan.accounting, VllmAccounting)
    layout, setup = plan.accounting.layout, plan.setup
    if "num_gpu_blocks" in logged and "kv_tokens" in logged:
        tokens = pool_of_blocks(layout, setup, logged["num_gpu_blocks"]).kv_tokens_logged
        yield Figure(case.id, case.kind, "kv_tokens of blocks", logged["kv_tokens"], tokens, tokens)
    if "max_concurrency" in logged and "kv_tokens" in logged:
        if setup.concurrency_tokens:
            low = high = logged["kv_tokens"] / setup.max_model_len
        else:
            blocks = logged["kv_tokens"] // (layout.least_block * setup.flags.dcp) * layout.groups
            ends = (pool_of_blocks(layout, setup, each) for each in (blocks, blocks + layout.groups - 1))
            low, high = (pool.max_concurrency for pool in ends)
        yield Figure(
            case.id, case.kind, "concurrency of tokens", logged["max_concurrency"], low, high, HALF_DIGIT
        )


def _sglang(case: Case) -> Iterator[Figure]:
    tokens = case.logged["kv_tokens"]
    details = case.plan(Given(), num_gpu_blocks=tokens).details
    for name, key in (
        ("k_size_gb", "k_gib"), ("v_size_gb", "v_gib"), ("swa_k_gb", "swa_k_gib"), ("swa_v_gb", "swa_v_gib"),
        ("swa_tokens", "swa_tokens"),
    ):  # fmt: skip
        if name in case.logged:
            value = float(details[key])  # type: ignore[arg-type]
            yield Figure(
                case.id,
                case.kind,
                name,
                case.logged[name],
                value,
                value,
                0 if name == "swa_tokens" else 0.0051,
            )
    if "ssm_gb" in case.logged:
        states = float(details["state_gib"])  # type: ignore[arg-type]
        both = case.logged["ssm_gb"] + case.logged["conv_gb"]
        yield Figure(case.id, case.kind, "ssm_gb + conv_gb", both, states, states, 0.011)


def weights_of(case: Case) -> tuple[float, float, float, float] | None:
    """GiB on one rank from the config alone (low, likely, high), and as logged; None where one is unknown."""
    logged, flags = case.logged.get("model_load_gib"), case.flags
    ranks = Ranks(tp=flags.get("tp", 1), pp=flags.get("pp", 1), dp=flags.get("dp", 1))
    draft = flags.get("num_spec", 0) > 0 and flags.get("spec_method") == "mtp"
    sizes = weight_bytes(case.model, flags.get("weight_dtype", "auto"), 2, ranks, draft=draft)
    if logged is None or sizes is None:
        return None
    low, likely, high = (size / GIB - (case.cpu_offload_gib or 0) for size in sizes)
    return low, likely, high, logged


@dataclass(frozen=True, slots=True)
class Interval:
    """Memory for KV as logged, against the interval that is planned without it."""

    case: str
    logged: float
    low: float
    likely: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low - HALF_DIGIT <= self.logged <= self.high + HALF_DIGIT

    @property
    def width(self) -> float:
        """Of the interval, relative to the pool."""
        return (self.high - self.low) / self.logged


def interval(case: Case, *, weights: bool) -> Interval | None:
    """The interval from the card and the utilisation; with the weights as logged or from the config.

    None where the log does not name a known card, the utilisation, or the memory.
    """
    logged = case.logged
    if (
        case.engine != "vllm"
        or "available_kv_gib" not in logged
        or "gpu_memory_utilization" not in case.flags
    ):
        return None
    total = f"{logged['gpu_total_gib']}GiB" if "gpu_total_gib" in logged else case.gpu
    if total is None or (weights and "model_load_gib" not in logged):
        return None
    try:
        card = card_of(total)
        known = logged.get("model_load_gib") if weights else None
        plan = case.plan(Given(card=card, weights_gib=known, cpu_offload_gib=case.cpu_offload_gib))
    except ValueError:
        return None
    available = plan.memory.available
    return Interval(case.id, logged["available_kv_gib"], available.low, available.likely, available.high)
