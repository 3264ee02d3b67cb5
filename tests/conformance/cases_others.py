"""Pages of TGI, SGLang, llama.cpp and what they must read as; all values are literals."""

from kvctl.core.outcomes import Absence
from tests.conformance.case import Case

MISSING = Absence.MISSING
_TOTALS = ("prompt_tokens_total", "generation_tokens_total")
_TGI_QUIET = dict.fromkeys((*_TOTALS, "steps_total", "output_lengths"), MISSING)
_SHARED = dict.fromkeys((*_TOTALS, "prefix_queries_total"), MISSING)

OTHER_CASES = [
    Case(
        engine="tgi",
        page="tgi-3.3-busy.prom",
        ranks={
            "0": {
                "kv_usage_ratio": 0.75,  # of what is reserved
                "usage_gauge": "tgi_batch_current_max_tokens",
                "usage_comparable": False,
                "running": 11,
                "waiting": 3,
                "prompt_tokens_total": 93120.0,
                "generation_tokens_total": 24360.0,
                "steps_total": 5120.0,
                "counts_at_end": True,
                "capacity_tokens": 16_000,
                "capacity_exact": False,
            }
        },
    ),
    Case(
        engine="tgi",
        page="tgi-3.3-idle.prom",
        ranks={"0": {"waiting": 0, "running": None, "kv_usage_ratio": None, "capacity_tokens": 16_000}},
        absent={**_TGI_QUIET, "running": MISSING, "kv_usage_ratio": MISSING},
    ),
    Case(
        engine="tgi",
        page="tgi-1.4.prom",
        ranks={"0": {"running": 2, "waiting": 0, "capacity_tokens": None}},
        absent={**_TGI_QUIET, "capacity_tokens": MISSING, "kv_usage_ratio": MISSING},
    ),
    Case(
        engine="sglang",
        page="sglang-0.5.prom",
        ranks={
            "0": {
                "model": "llama",
                "kv_usage_ratio": 0.25,  # 12,345 of 49,380 tokens
                "usage_gauge": "sglang:token_usage",
                "usage_comparable": False,
                "running": 9,
                "waiting": 2,  # not 3: the priority's part is in it
                "capacity_tokens": 49_380,
                "capacity_exact": False,
                "preemptions_total": 7.0,
                "prompt_tokens_total": 100_000.0,
                "generation_tokens_total": 41_000.0,
                "counts_at_end": False,
                "prefix_queries_total": 100_000.0,
                "prefix_hits_total": 12_500.0,
                "unsupported": None,
            }
        },
        absent={"output_lengths": MISSING},
    ),
    Case(
        engine="sglang",
        page="sglang-0.4-dp2.prom",
        ranks={
            "0": {
                "running": 4,  # as the first shard says, not both
                "waiting": 0,
                "kv_usage_ratio": 0.31,
                "capacity_tokens": 20_000,
                "prompt_tokens_total": 8_128_902.0,
                "generation_tokens_total": 7_557_572.0,
                "counts_at_end": True,
            },
            "1": {
                "running": 2,
                "waiting": 3,
                "kv_usage_ratio": 0.9,
                "capacity_tokens": 20_000,
                "generation_tokens_total": None,
            },
        },
        absent={"preemptions_total": MISSING, "prefix_hits_total": MISSING, "output_lengths": MISSING},
        absent_of={"1": _SHARED},
    ),
    Case(
        engine="sglang",
        page="sglang-0.3.prom",
        ranks={"0": {"model": "llama", "running": 0, "kv_usage_ratio": 0.28, "capacity_tokens": None}},
        absent={
            **_SHARED,
            "waiting": MISSING,
            "capacity_tokens": MISSING,
            "preemptions_total": MISSING,
            "prefix_hits_total": MISSING,
            "output_lengths": MISSING,
        },
    ),
    Case(
        engine="llamacpp",
        page="llamacpp-2026-idle.prom",
        ranks={"0": {"running": 0, "waiting": 0, "generation_tokens_total": 0.0, "steps_total": 0.0}},
        absent={"kv_usage_ratio": MISSING},
    ),
    Case(
        engine="llamacpp",
        page="llamacpp-2026-busy.prom",
        ranks={
            "0": {
                "running": 4,
                "waiting": 2,
                "prompt_tokens_total": 19.0,
                "generation_tokens_total": 120.0,
                "steps_total": 323.0,
                "counts_at_end": True,
                "capacity_tokens": None,
            }
        },
        absent={"kv_usage_ratio": MISSING},
    ),
    Case(
        engine="llamacpp",
        page="llamacpp-2024.prom",
        ranks={"0": {"running": 2, "kv_usage_ratio": 0.625, "generation_tokens_total": 1_400_170.0}},
        absent={"steps_total": MISSING},
    ),
]
