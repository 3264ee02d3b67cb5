"""Reading a model's ``config.json`` (of the Hugging Face form) without trusting a byte of it.

Everything that the planner wants to know passes through ``Facts``: a missing field, a string for a number,
zero heads or a NaN ends in one ``PlanError`` that names the field. Wrappers of multimodal models keep the
language model in a nested section (``text_config`` and others); the nested section wins and the outer one
fills gaps.

Besides ``config.json`` a *facts file* is read: the same fields, with two short forms. ``layer_types_counts``
(``{"full_attention": 10, "sliding_attention": 50}``) stands for ``layer_types`` in any order, and
``quantization`` for ``quantization_config``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.plan.errors import PlanError

MAX_BYTES = 4 * 1024 * 1024
MAX_INTEGER = 1 << 40
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_OUTER = (
    "architectures", "quantization_config", "quantization", "torch_dtype", "dtype", "tie_word_embeddings",
    "vocab_size", "model_type",
)  # fmt: skip


def read_config(path: Path) -> Mapping[str, Any]:
    """The object in the file, or in ``config.json`` of the folder. Raises PlanError."""
    target = path / "config.json" if path.is_dir() else path
    try:
        if target.stat().st_size > MAX_BYTES:
            raise PlanError(
                f"{target}: {target.stat().st_size} bytes; a config.json has less than {MAX_BYTES}"
            )
        raw = target.read_bytes()
    except OSError as error:
        raise PlanError(f"{target}: cannot be read: {error.strerror or error}") from None
    return parse_config(raw, str(target))


def parse_config(raw: bytes, name: str = "config") -> Mapping[str, Any]:
    """The JSON object in ``raw``. Raises PlanError for anything else."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise PlanError(f"{name}: not JSON") from None
    if not isinstance(document, dict):
        raise PlanError(f"{name}: a JSON object is wanted, not {type(document).__name__}")
    return document


@dataclass(frozen=True, slots=True)
class Facts:
    """Checked access to one config. ``values`` is the merged language-model section."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Facts":
        """Unwrap the language model's section; at most two wrappers deep, as models are built."""
        merged = dict(document)
        for _ in range(2):
            inner = next((merged[key] for key in _NESTED if isinstance(merged.get(key), dict)), None)
            if inner is None:
                break
            kept = {key: merged[key] for key in _OUTER if key in merged}
            merged = {**kept, **{key: value for key, value in inner.items() if value is not None}}
        return cls(merged)

    def has(self, *keys: str) -> bool:
        """Whether any of the keys is there with a value."""
        return any(self.values.get(key) is not None for key in keys)

    def integer(self, *keys: str, least: int = 1) -> int:
        """The first of the keys that is there, as an integer of at least ``least``. Raises PlanError."""
        found = self.optional(*keys, least=least)
        if found is None:
            raise PlanError(f"config: {keys[0]} is missing")
        return found

    def optional(self, *keys: str, least: int = 0) -> int | None:
        """As ``integer``; None where none of the keys is there. Law 3: absent is not zero."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                return whole(key, value, least)
        return None

    def text(self, key: str, default: str = "") -> str:
        """A string field, lower case; ``default`` where it is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise PlanError(f"config: {key} is {shown(value)}, not a string")
        return value.lower()

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean field."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"config: {key} is {shown(value)}, not true or false")
        return value

    def names(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, lower case; None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise PlanError(f"config: {key} is not a list of names")
        return tuple(each.lower() for each in value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers of at least 0; None where it is absent or a single number."""
        value = self.values.get(key)
        if not isinstance(value, list):
            return None
        return tuple(whole(f"{key}[{index}]", each, 0) for index, each in enumerate(value))

    def section(self, key: str) -> "Facts | None":
        """A nested object; None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise PlanError(f"config: {key} is {shown(value)}, not an object")
        return Facts(value)

    @property
    def model_type(self) -> str:
        """``model_type`` in lower case, without the ``_text`` of a nested section; "" if there is none."""
        return self.text("model_type").removesuffix("_text")

    @property
    def architectures(self) -> tuple[str, ...]:
        """``architectures`` in lower case."""
        return self.names("architectures") or ()


def whole(name: str, value: object, least: int) -> int:
    """``value`` if it is an integer in ``[least, 2**40]``. Raises PlanError otherwise."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"config: {name} is {shown(value)}, not an integer")
    if not least <= value <= MAX_INTEGER:
        raise PlanError(f"config: {name} is {value}; at least {least} is wanted")
    return value


def shown(value: object) -> str:
    """A value of a stranger, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def layer_names(facts: Facts, layers: int) -> tuple[str, ...] | None:
    """The type of each layer: ``layer_types``, ``layers_block_type`` or the counts of a facts file.

    Raises PlanError where the list does not have one entry per layer.
    """
    for key in ("layer_types", "layers_block_type"):
        listed = facts.names(key)
        if listed is not None:
            if len(listed) != layers:
                raise PlanError(f"config: {key} names {len(listed)} layers, num_hidden_layers says {layers}")
            return listed
    for key in ("layer_types_counts", "layers_block_type_counts"):
        counts = facts.section(key)
        if counts is not None:
            return _spread(key, counts, layers)
    return None


def _spread(key: str, counts: Facts, layers: int) -> tuple[str, ...]:
    """Counts as a list: the kinds evenly interleaved, which only pipeline stages can tell apart."""
    numbers = {name.lower(): counts.integer(name, least=0) for name in counts.values}
    total = sum(numbers.values())
    if total > layers:
        raise PlanError(f"config: {key} adds up to {total} layers, num_hidden_layers says {layers}")
    numbers["none"] = numbers.get("none", 0) + layers - total
    placed: Sequence[tuple[float, str]] = sorted(
        ((index + 0.5) / count, name) for name, count in numbers.items() for index in range(count)
    )
    return tuple(name for _, name in placed)
