"""From the options of ``kvctl plan`` to a model, flags and memory; also from a column of --compare."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from kvctl.control.reported import Reported
from kvctl.plan import Card, Flags, Given, Model, PlanError, card_of, describe, index_bytes, read_config
from kvctl.plan.flag_text import Asked, changed

_GIB = 1 << 30


class UnansweredError(PlanError):
    """Well asked, and nobody there to tell."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one plan is made from."""

    model: Model
    flags: Flags
    memory: Given
    spec: Model | None
    live: Reported | None


def inputs_of(given: Mapping[str, Any]) -> Inputs:
    """The inputs that the options name. Raises PlanError."""
    live = _live(given["like"])
    folder = given["config"] or (live.folder() if live is not None else None)
    if folder is None:
        served = "" if live is None or not live.model else f"the engine serves {live.model}, no folder here: "
        raise PlanError(f"{served}give --config FILE|DIR: the model's config.json")
    if not folder.exists():
        raise PlanError(
            f"--config {folder}: no such file or folder on this machine, and nothing is downloaded; give the "
            "model's folder, or its config.json"
        )
    model = describe(read_config(folder), _name(folder, live))
    spec = None if given["spec_config"] is None else describe(read_config(given["spec_config"]), "draft")
    flags = _flags(given)
    if live is not None:
        flags = live.adopt(
            flags, explicit=frozenset(key for key, value in given.items() if value is not None)
        )
    return Inputs(model, flags, _memory(given, folder), spec, live)


def _live(url: str | None) -> Reported | None:
    if url is None:
        return None
    from kvctl.cli.plan_live import read_live  # noqa: PLC0415 - HTTP only where asked for

    return read_live(url)


def _name(folder: Path, live: Reported | None) -> str:
    if live is not None and live.model:
        return live.model
    resolved = folder.resolve()
    if resolved.is_dir() or resolved.name != "config.json":
        return resolved.stem if resolved.is_file() else resolved.name
    return resolved.parent.name


def _flags(given: Mapping[str, Any]) -> Flags:
    names = {each.name for each in fields(Flags)}
    values = {key: value for key, value in given.items() if key in names and value is not None}
    values["version"] = given["engine_version"]
    values["num_gpu_blocks"] = given["num_gpu_blocks_override"]
    values["tp"] = _tp(given)
    return Flags(**values)


def _tp(given: Mapping[str, Any]) -> int:
    """TP as given, or what --num-gpus leaves after PP and DP, or DCP, which is a part of it.

    Raises PlanError where they contradict.
    """
    gpus, tp, rest = given["num_gpus"], given["tp"], given["pp"] * given["dp"]
    if gpus is None:
        return int(tp or given["dcp"])
    if tp is None:
        if gpus % rest:
            raise PlanError(f"--num-gpus {gpus} does not divide by --pp x --dp = {rest}")
        return int(gpus // rest)
    if tp * rest > gpus:
        raise PlanError(f"--tp x --pp x --dp = {tp * rest} is more than --num-gpus {gpus}")
    return int(tp)


def _memory(given: Mapping[str, Any], folder: Path) -> Given:
    total = index_bytes(folder if folder.is_dir() else folder.parent)
    return Given(
        card=_card(given),
        weights_gib=given["weights_gib"],
        weights_total_gib=None if total is None else total / _GIB,
        overhead_gib=given["overhead_gib"],
        available_gib=given["available_gib"],
        kv_cache_memory_bytes=given["kv_cache_memory_bytes"],
        cpu_offload_gib=given["cpu_offload_gib"],
    )


def _card(given: Mapping[str, Any]) -> Card | None:
    if given["measure"]:
        from kvctl.cli.plan_live import measured_card  # noqa: PLC0415 - the driver only where asked for

        return measured_card()
    if given["gpu"] is None:
        return None
    try:
        return card_of(given["gpu"])
    except PlanError as error:
        if given["available_gib"] is None and given["kv_cache_memory_bytes"] is None:
            raise
        click.echo(f"kvctl: {error}; the defaults of a small card apply", err=True)
        return None


def variant(base: Inputs, text: str) -> Inputs:
    """``base`` with the changes of one --compare: a card, or ``key=value`` of flags. Raises PlanError."""
    changes = [part.strip() for part in text.split(",") if part.strip()]
    if not changes:
        raise PlanError("--compare: a card or KEY=VALUE,... is wanted")
    asked = Asked(base.flags, base.memory)
    for change in changes:
        key, separator, value = change.partition("=")
        try:
            asked = changed(asked, key.strip(), value.strip()) if separator else changed(asked, "gpu", change)
        except PlanError as error:
            raise PlanError(f"--compare {error}") from None
    return replace(base, flags=asked.flags, memory=asked.memory)
