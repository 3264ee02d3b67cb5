"""A plan as a JSON document. The keys of the first group are stable; the others may grow.

Units: ``*_gib`` GiB, ``mib_*`` MiB, ``*_tokens`` and ``length`` tokens, everything per rank.
"""

from typing import Any

from kvctl.plan.explain import formulas
from kvctl.plan.memory import Span
from kvctl.plan.planner import Plan
from kvctl.plan.vllm import Pool


def as_document(plan: Plan, *, explain: bool = False) -> dict[str, Any]:
    """The document of ``-o json``; with ``explain`` also ``formulas``."""
    accounting, pool = plan.accounting, plan.pool
    document: dict[str, Any] = {
        "bytes_per_token": accounting.bytes_per_token,
        "bytes_per_block": accounting.bytes_per_block,
        "num_blocks": pool.num_blocks,
        "kv_tokens": pool.kv_tokens,
        "kv_tokens_logged": pool.kv_tokens_logged,
        "max_concurrency": pool.max_concurrency,
        "max_model_len_fits": plan.max_model_len_fits,
        "assumptions": list(plan.assumptions),
        "warnings": list(plan.warnings),
        "model": plan.model.name,
        "engine": plan.setup.flags.engine,
        "engine_version": str(plan.setup.version),
        "block_size": accounting.block,
        "kv_dtype": plan.setup.kv.name,
        "max_model_len": plan.setup.max_model_len,
        "bytes_per_token_beyond_windows": accounting.bytes_per_token_beyond,
        "available_gib": _span(plan.memory.available),
        "memory": [{"term": t.name, **_span(t.gib), "source": t.source} for t in plan.memory.terms],
        "interval": {"low": _pool(plan.low), "high": _pool(plan.high)},
        "concurrency": [
            {
                "length": p.length,
                "requests": round(p.concurrency, 4),
                "mib_per_request": round(p.mib_per_request, 3),
            }
            for p in plan.curve
        ],
        "binding": plan.binding,
        "details": dict(plan.details),
    }
    if explain:
        document["formulas"] = [
            {"name": f.name, "formula": f.formula, "value": f.value, "source": f.source}
            for f in formulas(plan)
        ]
    return document


def _span(span: Span) -> dict[str, float]:
    return {"low": round(span.low, 4), "likely": round(span.likely, 4), "high": round(span.high, 4)}


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "num_blocks": pool.num_blocks,
        "kv_tokens": pool.kv_tokens,
        "kv_tokens_logged": pool.kv_tokens_logged,
        "max_concurrency": pool.max_concurrency,
    }
