"""The capacity that the planner expects of the running engine: to compare, or to use where it reports none.

Blocks: it reads a model's folder. Without a card only the layout can be judged, not the size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvctl.control.reported import Reported
from kvctl.core.telemetry import GpuSample
from kvctl.plan import (
    GIB,
    Card,
    Crosscheck,
    Model,
    Plan,
    PlanError,
    Verdict,
    crosscheck,
    describe,
    index_bytes,
    make_plan,
    planned_capacity,
    read_config,
)
from kvctl.plan.flag_text import Asked, parse_flags

_TOKENIZER_WORDS = ("engine", "bound")


@dataclass(frozen=True, slots=True)
class PlanSource:
    """What to plan: the model's folder (or its config.json), and what the settings say of the engine."""

    config: Path
    asked: Asked

    @property
    def folder(self) -> Path:
        """Where the weights may lie beside the config."""
        return self.config if self.config.is_dir() else self.config.parent

    @property
    def needs_card(self) -> bool:
        """Whether the memory is still to be told by a card."""
        given = self.asked.memory
        known = (
            given.card,
            given.available_gib,
            given.kv_cache_memory_bytes,
            self.asked.flags.num_gpu_blocks,
        )
        return all(each is None for each in known)


@dataclass(frozen=True, slots=True)
class Judgement:
    """``check`` None: nothing to compare. ``tokens``: what to count on if the engine reports no pool."""

    check: Crosscheck | None
    tokens: int | None
    note: str = ""  # why ``tokens`` is None


def plan_source(plan_model: Path | None, tokenizer: str, plan_flags: str) -> PlanSource | None:
    """From the settings; None where neither names a folder with a config.json. Raises PlanError."""
    config = plan_model
    if config is None and tokenizer not in _TOKENIZER_WORDS:
        try:
            folder = Path(tokenizer).expanduser()
        except RuntimeError:
            raise PlanError(f"tokenizer {tokenizer!r}: this user has no home") from None
        config = folder if (folder / "config.json").is_file() else None
    return None if config is None else PlanSource(config, parse_flags(plan_flags))


def smallest_card(samples: Iterable[GpuSample]) -> Card | None:
    """The card with the least memory as the driver says it; None where none is known."""
    sizes = [(s.total_bytes, s.name) for s in samples if s.total_bytes is not None and not s.lost]
    if not sizes:
        return None
    total, name = min(sizes)
    return Card(name or "this machine's card", total / GIB, seen=True)


def judge(source: PlanSource, engine: Reported, card: Card | None) -> Judgement:
    """The engine's pool against the plan. Raises PlanError where the model cannot be planned at all."""
    model = describe(read_config(source.config), engine.model or source.folder.name)
    check, told = None, engine.tokens
    if engine.blocks is not None:
        pooled = _plan(model, source, engine, card, pool=True)
        told = pooled.pool.kv_tokens_logged if told is None else told
        check = crosscheck(pooled, told, engine.blocks)
    try:
        sized = _plan(model, source, engine, card, pool=False)
    except PlanError as error:
        return Judgement(check, None, str(error))
    if told is not None and (check is None or check.verdict is Verdict.AGREES):
        check = crosscheck(sized, told)
    tokens = planned_capacity(sized)
    note = "" if tokens else "the plan leaves nothing for KV at the low end of its interval"
    return Judgement(check, tokens or None, note)


def _plan(model: Model, source: PlanSource, engine: Reported, card: Card | None, *, pool: bool) -> Plan:
    asked = source.asked
    total = index_bytes(source.folder)
    memory = replace(
        asked.memory,
        card=asked.memory.card or card,
        weights_total_gib=None if total is None else total / GIB,
    )
    return make_plan(model, engine.adopt(asked.flags, asked.explicit, pool=pool), memory)
