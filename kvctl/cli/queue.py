"""``kvctl queue``: who waits, before kvctl and in the engines behind it, and what tenants hold."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from kvctl.cli.common import brief, count, look, looks_at_daemon, table

_COLUMNS = ("HIGH", "NORMAL", "LOW", "TOKENS", "OLDEST", "STARTS IN")


@click.command()
@looks_at_daemon
def queue(**asked: Any) -> None:
    """Who waits, by engine and priority, and what each tenant has in flight."""
    look("/v1/queue", lambda it: _lines(it["engines"]), **asked)


def _lines(engines: Mapping[str, Any]) -> Iterator[str]:
    yield table([_row(name, each) for name, each in engines.items()])
    if off := [name for name, each in engines.items() if each["queue"] is None]:
        whom = "" if len(off) == len(engines) else f" for {', '.join(off)}"
        yield f"the queue is off{whom}: what does not fit is refused at once (queue_max_wait)"
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
    queue = each["queue"]
    return {
        "ENGINE": name,
        **(dict.fromkeys(_COLUMNS, "off") if queue is None else _waiting(queue)),
        "IN ENGINE": count(each["engine_waiting"]),
    }


def _waiting(queue: Mapping[str, Any]) -> Mapping[str, str]:
    starts = queue["head_starts_in_s"]
    return {
        **{word: count(queue["waiting"].get(word.lower(), 0)) for word in _COLUMNS[:3]},
        "TOKENS": count(queue["tokens"]),
        "OLDEST": brief(queue["oldest_s"]),
        "STARTS IN": "-" if starts is None else brief(max(starts, 0.0)),
    }
