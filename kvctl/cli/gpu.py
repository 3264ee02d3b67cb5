"""``kvctl gpu``: the cards as the daemon reads them, and how to release them for a while."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.cli.card_remedies import no_reading
from kvctl.cli.common import (
    answer,
    daemon,
    for_option,
    gib,
    look,
    looks_at_daemon,
    output_option,
    span,
    table,
    talks_to_daemon,
)

Document = Mapping[str, Any]


@click.group()
def gpu() -> None:
    """The cards that the daemon watches."""


@gpu.command("list")
@looks_at_daemon
def list_cards(**asked: Any) -> None:
    """The cards, the engines that use them, and what the driver says of them."""
    look("/v1/gpus", _lines, **asked)


@gpu.command()
@for_option("How long at most; 1h is the most.", default="5m")
@click.option("--reason", default="", help="Why; it is kept in the audit log.")
@output_option
@talks_to_daemon
def release(*, ttl: float, reason: str, output: str, socket: Path | None, timeout: float) -> None:
    """Release the driver, so that cards can be reset or partitioned, or the driver unloaded.

    Traffic goes on, on the engines' own telemetry. When this returns, kvctl holds no handle; it opens the
    driver again by itself when the time is over, or at kvctl gpu acquire.

    Example: kvctl gpu release --for 10m --reason "MIG layout"
    """
    _asked(ttl, reason, output, socket, timeout)


@gpu.command()
@output_option
@talks_to_daemon
def acquire(*, output: str, socket: Path | None, timeout: float) -> None:
    """Read the cards again, before the time of a release is over."""
    _asked(0.0, "", output, socket, timeout)


def _asked(seconds: float, reason: str, output: str, socket: Path | None, timeout: float) -> None:
    body = {"for_s": seconds, **({"reason": reason} if reason else {})}
    with daemon(socket, timeout) as client:
        document = client.post("/v1/gpu/release", body)
    left = document["released_s"]
    line = "the cards are read again" if left is None else f"no card is held, for up to {span(left)}"
    answer(document, output, lambda _: [line])


def _lines(document: Document) -> Iterator[str]:
    if document["gpus"]:
        yield table([_row(card) for card in document["gpus"]])
    if document["driver"] is not None:
        yield f"driver {document['driver']}"
    if document["released_s"] is not None:
        yield f"released for up to {span(document['released_s'])}; kvctl gpu acquire ends that"
    elif document["gpu_fault"] is not None:
        yield no_reading(document["gpu_fault"])
    elif not document["gpus"]:
        yield "no card is watched"


def _row(card: Document) -> Mapping[str, str]:
    return {
        "GPU": "?" if card["index"] is None else str(card["index"]),
        "UUID": card["uuid"],
        "FREE": gib(card["free_bytes"]),
        "TEMP": "?" if card["temperature_c"] is None else f"{card['temperature_c']:.0f} C",
        "CLOCKS": _clocks(card["throttle_reasons"]),
        "EVENTS": card["absent"].get("events", "yes"),
        "PROCESSES": _processes(card),
        "ENGINES": ", ".join(card["engines"]) or "-",
        "STATE": "lost" if card["lost"] else "ok",
    }


def _clocks(reasons: list[str] | None) -> str:
    return "?" if reasons is None else ", ".join(reasons) or "free"


def _processes(card: Document) -> str:
    """The number of processes; the JSON form has what each holds."""
    if card["processes"] is None:
        return str(card["absent"].get("processes", "?"))
    return str(len(card["processes"]))
