"""``kvctl queue``: who waits, before kvctl and in the engines behind it, and what tenants hold."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.cli.common import (
    answer,
    count,
    daemon,
    output_option,
    repeatedly,
    span,
    table,
    talks_to_daemon,
    watched,
)


@click.command()
@watched
@output_option
@talks_to_daemon
def queue(watch: float | None, output: str, socket: Path | None, timeout: float) -> None:
    """Who waits, by engine and priority, and what each tenant has in flight."""

    def once() -> None:
        with daemon(socket, timeout) as client:
            document = client.get("/v1/queue")
        answer(document, output, lambda it: _lines(it["engines"]))

    repeatedly(watch, output, once)


def _lines(engines: Mapping[str, Any]) -> Iterator[str]:
    yield table([_row(name, each) for name, each in engines.items()])
    tenants = [
        {
            "TENANT": tenant["tenant"],
            "ENGINE": name,
            "IN FLIGHT": count(tenant["in_flight_tokens"]),
            "USED": count(tenant["used_token_seconds"]),
        }
        for name, each in engines.items()
        for tenant in each["tenants"]
    ]
    if tenants:
        yield ""
        yield table(tenants)


def _row(name: str, each: Mapping[str, Any]) -> Mapping[str, str]:
    waits = each["queue"] or {"waiting": {}, "tokens": 0, "oldest_s": 0, "head_starts_in_s": None}
    starts = waits["head_starts_in_s"]
    return {
        "ENGINE": name,
        **{f"{word.upper()}": count(waits["waiting"].get(word, 0)) for word in ("high", "normal", "low")},
        "TOKENS": count(waits["tokens"]),
        "OLDEST": span(waits["oldest_s"]),
        "STARTS IN": "-" if starts is None else span(max(starts, 0.0)),
        "IN ENGINE": count(each["engine_waiting"]),
    }
