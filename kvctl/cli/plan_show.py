"""A plan as text: the report, the chart of concurrency against context, columns side by side."""

from collections.abc import Sequence

from kvctl.cli.common import table
from kvctl.plan import Plan, formulas
from kvctl.plan.memory import Span

_BAR = 36


def report(plan: Plan) -> str:
    """The whole answer without --explain."""
    parts = [_pool_lines(plan), _memory_lines(plan), chart(plan), _list("assumed", plan.assumptions)]
    parts.append(_list("warning", plan.warnings))
    return "\n\n".join(part for part in parts if part)


def _pool_lines(plan: Plan) -> str:
    accounting, pool, setup = plan.accounting, plan.pool, plan.setup
    beyond = accounting.bytes_per_token_beyond
    lines = [
        ("model", f"{plan.model.name} on {setup.flags.engine} {setup.version}, {_layout(plan)}"),
        ("bytes per token", f"{_kib(accounting.bytes_per_token)} per token and rank" + (
            "" if beyond == accounting.bytes_per_token else f", {_kib(beyond)} beyond every window")),
        ("bytes per block", f"{accounting.bytes_per_block:,}"),
        ("blocks", _between(pool.num_blocks, plan.low.num_blocks, plan.high.num_blocks)),
        ("KV tokens", _between(pool.kv_tokens, plan.low.kv_tokens, plan.high.kv_tokens)),
        ("the engine's log says", _logged(plan)),
        ("largest context that fits", f"{plan.max_model_len_fits:,}"),
        ("decided by", plan.binding),
    ]  # fmt: skip
    lines.extend((key.replace("_", " "), str(value)) for key, value in plan.details.items() if value)
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def _layout(plan: Plan) -> str:
    flags = plan.setup.flags
    sizes = [f"{name} {value}" for name, value in
             (("TP", flags.tp), ("PP", flags.pp), ("DP", flags.dp), ("DCP",
             flags.dcp)) if value > 1]  # fmt: skip
    return ", ".join([*sizes, f"KV {plan.setup.kv.name}", f"block {plan.accounting.block}"])


def _logged(plan: Plan) -> str:
    requests = f"{plan.pool.max_concurrency:.2f}x for {plan.setup.max_model_len:,} tokens per request"
    return f"{plan.pool.kv_tokens_logged:,} tokens, {requests}"


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f} KiB"


def _between(likely: int, low: int, high: int) -> str:
    return f"{likely:,}" if low == high else f"{likely:,} (between {max(0, low):,} and {high:,})"


def _memory_lines(plan: Plan) -> str:
    rows = [_row(term.name if index == 0 else f"- {term.name}", term.gib, term.source)
            for index, term in enumerate(plan.memory.terms)]  # fmt: skip
    rows.append(
        _row("memory for KV", plan.memory.available, plan.memory.source if not plan.memory.terms else "")
    )
    return table(rows)


def _row(name: str, span: Span, source: str) -> dict[str, str]:
    return {
        "GiB per GPU": name, "low": f"{span.low:.2f}", "likely": f"{span.likely:.2f}",
        "high": f"{span.high:.2f}",
        "from": source,
    }  # fmt: skip


def chart(plan: Plan) -> str:
    """Concurrency against context length, a bar a line; long bars are cut with a mark."""
    most = max(point.concurrency for point in plan.curve)
    lines = ["context      requests  MiB each"]
    for point in plan.curve:
        share = point.concurrency / most if most > 0 else 0
        bar = "█" * round(share * _BAR) or ("▏" if point.concurrency > 0 else "")
        lines.append(
            f"{point.length:>9,}  {point.concurrency:>10,.2f}  {point.mib_per_request:>8,.1f}  {bar}".rstrip()
        )
    return "\n".join(lines)


def _list(word: str, texts: Sequence[str]) -> str:
    return "\n".join(f"{word}: {text}" for text in texts)


def side_by_side(names: Sequence[str], plans: Sequence[Plan]) -> str:
    """One column per plan."""
    rows = []
    for label, value in (
        ("memory for KV, GiB", lambda p: f"{p.memory.available.likely:.2f}"),
        ("KiB per token", lambda p: f"{p.accounting.bytes_per_token / 1024:.1f}"),
        ("KV tokens", lambda p: f"{p.pool.kv_tokens:,}"),
        ("between", lambda p: f"{max(0, p.low.kv_tokens):,}-{p.high.kv_tokens:,}"),
        ("requests of max_model_len", lambda p: f"{p.pool.max_concurrency:.2f}"),
        ("largest context that fits", lambda p: f"{p.max_model_len_fits:,}"),
        ("decided by", lambda p: p.binding.split(":")[0]),
    ):
        columns = {
            f"{index}. {name}": value(plan)
            for index, (name, plan) in enumerate(zip(names, plans, strict=True))
        }
        rows.append({"": label, **columns})
    return table(rows)


def explanation(plan: Plan) -> str:
    """Every figure with its formula and where it was read."""
    return table(
        [
            {"figure": f.name, "formula": f.formula, "value": f.value, "source": f.source}
            for f in formulas(plan)
        ]
    )
