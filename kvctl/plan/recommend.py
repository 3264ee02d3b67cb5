"""Settings that fit the plan, as a ``kvctl.toml``.

* ``margin``: half a block per running sequence is lost to rounding, and never less than 5 %; at most 30 %. A
  hybrid model gets 5 % more: its requests' cost is least certain.
* ``max_context``: the longest request that fits, less one block of room.
* ``--max-num-queued-reqs`` of the engine (0.29 and later, waiting and running together): what the pool holds
  at a quarter of the context, or ``max_num_seqs`` if that is less, and half as many again. The gate queues
  before it.
"""

from dataclasses import dataclass

from kvctl.plan.planner import Plan

_LEAST, _MOST, _HYBRID = 0.05, 0.30, 0.05


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``margin`` a share; ``max_context`` tokens; ``queued`` requests for all ranks together."""

    margin: float
    max_context: int
    queued: int


def recommend(plan: Plan) -> Recommendation:
    """What fits this plan."""
    tokens = max(1, plan.pool.kv_tokens)
    short = max(1, plan.setup.max_model_len // 4)
    at_once = plan.pool.num_blocks / max(1, plan.accounting.blocks_for(short))
    running = max(1.0, min(at_once, float(plan.setup.seqs)))
    lost = running * plan.accounting.block / 2 / tokens
    margin = max(_LEAST, lost) + (
        _HYBRID if plan.accounting.bytes_per_token_beyond != plan.accounting.bytes_per_token else 0
    )
    longest = min(plan.setup.max_model_len, plan.max_model_len_fits)
    room = longest - plan.accounting.block if longest == plan.pool.max_model_len_fits else longest
    return Recommendation(
        margin=round(min(_MOST, margin), 3),
        max_context=max(1, room),
        queued=max(1, int(running * 1.5)) * plan.setup.flags.dp,
    )


def as_toml(plan: Plan, engine_url: str, plan_model: str = "", plan_flags: str = "") -> str:
    """A settings file that ``kvctl check-config`` accepts; the engine's flag stands in a comment.

    ``plan_model`` and ``plan_flags`` let the daemon make the same plan, to compare the engine with it.

    Control characters of the model's name cannot break out of the comment.
    """
    advice = recommend(plan)
    name = "".join(character if character.isprintable() else "?" for character in plan.model.name)
    lines = [
        f"# kvctl plan --recommend: {name} on {plan.setup.flags.engine} {plan.setup.version}",
        f"# pool: {plan.pool.kv_tokens:,} KV tokens ({plan.low.kv_tokens:,} to {plan.high.kv_tokens:,})",
        f"# engine flag that fits: --max-num-queued-reqs {advice.queued} (vLLM 0.29 and later)",
        f"engine_url = {_quoted(engine_url)}",
        f"margin = {advice.margin}",
        f"max_context = {advice.max_context}",
    ]
    named = {"plan_model": plan_model, "plan_flags": plan_flags}
    lines += [f"{key} = {_quoted(value)}" for key, value in named.items() if value]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else "?" for each in escaped) + '"'
