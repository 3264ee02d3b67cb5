"""Flags as text: a column of ``kvctl plan --compare``, and the daemon's setting ``plan_flags``.

The names are those of ``kvctl plan``, as ``--name value``, ``--name=value``, or ``--prefix-caching`` and
``--no-prefix-caching`` alone. Every PlanError names the flag.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from kvctl.plan.cards import card_of
from kvctl.plan.errors import PlanError
from kvctl.plan.memory import Given
from kvctl.plan.setup import Flags


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is asked for beside the model. ``explicit``: the fields that somebody named."""

    flags: Flags = field(default_factory=Flags)
    memory: Given = field(default_factory=Given)
    explicit: frozenset[str] = frozenset()


def _whole(text: str) -> int:
    return int(text.replace("_", ""))


def _on(text: str) -> bool:
    return {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}[text.lower()]


def _engine(text: str) -> str:
    return {"vllm": "vllm", "sglang": "sglang", "tgi": "tgi"}[text]


_SWITCHES = ("prefix_caching", "async_scheduling", "hybrid_manager")
_WHOLE = (
    "tp", "pp", "dp", "dcp", "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "num_spec", "mamba_slots", "num_gpu_blocks",
)  # fmt: skip
_READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_WHOLE, _whole),
    **dict.fromkeys(("gpu_memory_utilization", "swa_full_tokens_ratio"), float),
    **dict.fromkeys(_SWITCHES, _on),
    **dict.fromkeys(("weight_dtype", "kv_dtype", "spec_method", "version"), str),
    "engine": _engine,
}
_MEMORY: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("weights_gib", "overhead_gib", "available_gib", "cpu_offload_gib"), float),
    "kv_cache_memory_bytes": _whole,
}
_OTHER_NAMES: Mapping[str, str] = {
    "engine_version": "version", "num_gpu_blocks_override": "num_gpu_blocks",
    "cpu_offload_gb": "cpu_offload_gib", "hybrid_kv_cache_manager": "hybrid_manager",
}  # fmt: skip
_OFF: Mapping[str, str] = {
    "no_prefix_caching": "prefix_caching", "no_async_scheduling": "async_scheduling",
    "disable_hybrid_kv_cache_manager": "hybrid_manager",
}  # fmt: skip


def changed(base: Asked, name: str, value: str) -> Asked:
    """``base`` with one flag set. Raises PlanError for an unknown name or a value that is none."""
    key = name.lstrip("-").replace("-", "_")
    key = _OTHER_NAMES.get(key, key)
    try:
        if key == "gpu":
            return _with_card(base, value)
        if key in _MEMORY:
            memory: dict[str, Any] = {key: _MEMORY[key](value)}
            return replace(base, memory=replace(base.memory, **memory), explicit=base.explicit | {key})
        if key not in _READERS:
            raise PlanError(f"{name}: no flag of a plan{_nearest(key)}")
        flags: dict[str, Any] = {key: _READERS[key](value)}
        return replace(base, flags=replace(base.flags, **flags), explicit=base.explicit | {key})
    except (KeyError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{name}: {value!r} is no value for it") from None


def _nearest(key: str) -> str:
    known = [*_READERS, *_MEMORY, *_OTHER_NAMES, "gpu"]
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
    return "; " + hint.replace("_", "-")


def flags_text(given: Mapping[str, Any]) -> str:
    """The flags among ``given`` (option names with underscores) as ``parse_flags`` reads them."""
    off = {name: flag for flag, name in _OFF.items()}
    words = []
    for name, value in given.items():
        key = _OTHER_NAMES.get(name, name)
        if value is None or not (key in _READERS or key in _MEMORY or key == "gpu"):
            continue
        if key in _SWITCHES:
            words.append("--" + (key if value else off[key]).replace("_", "-"))
        else:
            words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words)


def _with_card(base: Asked, text: str) -> Asked:
    """Another card: what was said of the first one's free memory no longer holds."""
    memory = replace(base.memory, card=card_of(text), available_gib=None, kv_cache_memory_bytes=None)
    return replace(base, memory=memory, explicit=base.explicit | {"gpu"})


def parse_flags(text: str) -> Asked:
    """The flags of a command line, such as ``--tp 2 --gpu H100``. Raises PlanError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise PlanError(f"{text!r}: {error}") from None
    asked = Asked()
    for name, value in _pairs(words):
        asked = changed(asked, name, value)
    return asked


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--"):
            raise PlanError(f"{word!r} is no flag of kvctl plan: write --tp 2, say")
        if equals:
            yield name, value
        elif key in _OFF:
            yield "--" + _OFF[key], "off"
        elif _OTHER_NAMES.get(key, key) in _SWITCHES:
            yield name, "on"
        else:
            yield name, _next(rest, name)


def _next(rest: Iterator[str], name: str) -> str:
    value = next(rest, None)
    if value is None or value.startswith("--"):
        raise PlanError(f"{name} wants a value")
    return value
