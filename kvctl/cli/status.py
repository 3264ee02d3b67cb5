"""``kvctl status``: the tick's sentence first, then the numbers behind it, in 80 columns."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import click

from kvctl.cli.card_remedies import no_reading
from kvctl.cli.common import (
    count,
    gib,
    look,
    looks_at_daemon,
    paint,
    percent,
    span,
    table,
)
from kvctl.cli.knobs import drain_lines, override_lines
from kvctl.core.outcomes import SERVING, EngineState

Document = Mapping[str, Any]
WIDTH = 80
DRAINING = "draining"  # the mode where every engine is
_DRAINED = f", {DRAINING}"
_NAME = 24  # of a card
_GUESSED = {"operator": " (set)", "plan": " (planned)", "fallback": " (assumed)"}


@click.command()
@looks_at_daemon
def status(**asked: Any) -> None:
    """What the daemon does and why."""
    look("/v1/status", page, **asked)


def page(document: Document) -> list[str]:
    """The lines of the table form."""
    engines, gpus = document["engines"], document["gpus"]
    blocks = [
        _sentence(document) + wrapped([paint(each, fg="red") for each in drain_lines(document["overrides"])]),
        *(list(_engine(name, gate, document["mode"])) for name, gate in engines.items()),
        table(list(_ranks(engines))).splitlines(),
        table([_gpu(card) for card in gpus]).splitlines(),
        _cards(document),
        _counting(document),
        _config(document),
        wrapped(override_lines(document["overrides"])),
    ]
    head, *rest = [block for block in blocks if block]
    return head + [line for block in rest for line in ["", *block]]


def wrapped(lines: list[str]) -> list[str]:
    """Lines of at most 80 columns, what goes on set in by two."""
    return [
        part
        for line in lines
        for part in (textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [""])
    ]


def _sentence(document: Document) -> list[str]:
    mode, sentence = document["mode"], document["sentence"]
    if mode == DRAINING:  # the first word says it for all engines
        sentence = sentence.replace(_DRAINED, "")
    said = sentence if mode == "active" else f"{mode}: {sentence}"
    return [paint(line, fg=_colour(document)) for line in wrapped([said])]


def _colour(document: Document) -> str:
    states = {gate["state"] for gate in document["engines"].values()}
    if document["mode"] != "active" or states - {str(state) for state in SERVING}:
        return "red"
    return "green" if states <= {EngineState.UP.value} else "yellow"


def _engine(name: str, gate: Document, mode: str) -> Iterator[str]:
    guess = _GUESSED.get(gate["capacity_source"], "")
    pressure = min((each for each in gate["pressure"].values() if each is not None), default=1.0)
    drained = _DRAINED if gate["draining"] and mode != DRAINING else ""
    yield f"{paint(name, bold=True)}  {gate['state']}, policy {gate['policy']}{drained}"
    yield _pair("capacity", count(gate["capacity_tokens"]) + guess, "margin", percent(gate["margin_ratio"]))
    yield _pair("budget", count(gate["budget_tokens"]), "pressure", f"{pressure:.2f}")
    yield _pair("forecast", count(gate["forecast_peak_tokens"]), "headroom", count(gate["headroom_tokens"]))
    yield _pair("held", count(gate["held_tokens"]), "claimed", count(gate["claimed_tokens"]))
    yield _pair("in flight", count(gate["leases"]), "nearest limit", gate["binding_limit"])
    yield f"  {'budget is':<12}{gate['budget_reason']}"
    if gate["enforce_ratio"] < 1.0:
        yield f"  {'enforced':<12}on {percent(gate['enforce_ratio'])} of the requests"
    if gate["queue"] is not None and sum(gate["queue"]["waiting"].values()):
        waiting, oldest = sum(gate["queue"]["waiting"].values()), span(gate["queue"]["oldest_s"])
        yield f"  {'queue':<12}{waiting} wait, the first for {oldest}"
    gauges = sorted({rank["usage_gauge"] for rank in gate["ranks"] if rank.get("usage_gauge")})
    if gauges:
        yield f"  {'usage gauge':<12}{', '.join(gauges)}"


def _pair(one: str, its: str, other: str, others: str) -> str:
    return f"  {one:<12}{its:<22}{other:<15}{others}"


def _cards(document: Document) -> list[str]:
    """Only where no card can be read."""
    fault = document.get("gpu_fault")
    return [] if fault is None else wrapped([no_reading(fault)])


def _counting(document: Document) -> list[str]:
    """Only where a tokenizer is not the one that the engine runs."""
    doubts = {name: each["doubted"] for name, each in document.get("counting", {}).items()}
    return wrapped(
        [
            paint(f"the tokenizer is not that of {name}: {why}; it is not used", fg="red")
            for name, why in doubts.items()
            if why
        ]
    )


def _config(document: Document) -> list[str]:
    """Only where something is wrong with the settings: a reload that was refused."""
    problems = document.get("config", {}).get("problems") or []
    if not problems:
        return []
    return wrapped(
        [paint("the last reload was refused, the old settings are in force:", fg="red"), *problems]
    )


def _ranks(engines: Document) -> Iterator[Mapping[str, str]]:
    """Of several engines each rank has its engine's name before it."""
    for name, gate in engines.items():
        shown = {"ENGINE": name} if len(engines) > 1 else {}
        yield from (shown | _rank(rank) for rank in gate["ranks"])


def _rank(rank: Document) -> dict[str, str]:
    return {
        "RANK": rank["rank"],
        "AGE": f"{rank['age_s']:.1f} s",
        "CAPACITY": count(rank["capacity_tokens"]),
        "USED": percent(rank["kv_usage_ratio"]),
        "RUNNING": count(rank["running"]),
        "WAITING": count(rank["waiting"]),
        "PREEMPTIONS": count(rank["preemptions_total"]),
    }


def _gpu(card: Document) -> Mapping[str, str]:
    name = card["name"] or "?"
    return {
        "GPU": "?" if card["index"] is None else str(card["index"]),
        "NAME": name if len(name) <= _NAME else name[: _NAME - 1] + "~",
        "USED": gib(card["used_bytes"]),
        "FREE": gib(card["free_bytes"]),
        "TOTAL": gib(card["total_bytes"]),
        "AGE": span(card["age_s"]) if card["age_s"] >= 1 else f"{card['age_s']:.1f} s",
        "STATE": "lost" if card["lost"] else "ok",
    }
