"""``kvctl drain``, ``undrain``, ``bypass`` and ``resume``: whether traffic is let in, and who decided so."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvctl.admin.client import AdminClient, TimedOutError
from kvctl.cli.common import (
    answer,
    confirm,
    daemon,
    for_option,
    output_option,
    span,
    talks_to_daemon,
    yes_option,
)

_PEEK_S = 0.5
_LOST = "kvctl: in force, but the daemon could not write it down: a restart would undo it"

# what follows, by the mode that the daemon is in then
_BYPASSED = {
    "bypass": "everything is let in, and counted; kvctl resume ends it",
    "draining": "the bypass holds, and so does the drain: nothing is let in until kvctl undrain",
}
_RESUMED = {
    "active": "its limits are enforced again",
    "bypass": "the bypass is over, and nothing is enforced all the same: the settings say enforce = 0",
    "draining": "the bypass is over; nothing is let in until kvctl undrain",
}

_engine_option = click.option("--engine", metavar="NAME", help="Only this one of several engines.")


def _route(verb: str, engine: str | None) -> str:
    return f"/v1/{verb}" if engine is None else f"/v1/{verb}?engine={quote(engine, safe='')}"


@click.command()
@click.option(
    "--wait", is_flag=True, help="Return when nothing runs any more, or --timeout is over (exit 6)."
)
@click.option("--reason", default="", help="Why; kvctl status shows it, and the audit log keeps it.")
@_engine_option
@yes_option
@output_option
@talks_to_daemon
def drain(
    *,
    wait: bool,
    reason: str,
    engine: str | None,
    yes: bool,
    output: str,
    socket: Path | None,
    timeout: float,
) -> None:
    """Admit nothing new; what runs goes on. New requests get 503 and /readyz says no.

    With --engine the other engines go on, and requests go to them. A drain holds until kvctl undrain, also
    across restarts and crashes.

    Example: kvctl drain --wait --timeout 600 --reason "new driver"
    """
    what = "New requests will get 503" if engine is None else f"Nothing new will go to {engine}"
    confirm(f"{what} until kvctl undrain. Go on?", yes=yes)
    with daemon(socket, timeout) as client:
        document = client.post(_route("drain", engine), {"reason": reason} if reason else None)
        if wait:
            _until_idle(client, timeout, engine)
    whom = "new requests get 503" if engine is None else f"nothing new goes to {engine}"
    runs = "nothing runs any more" if wait else "what runs goes on"
    _told(document, output, f"{whom}, and {runs}; kvctl undrain ends it")


@click.command()
@_engine_option
@output_option
@talks_to_daemon
def undrain(engine: str | None, output: str, socket: Path | None, timeout: float) -> None:
    """Admit again."""
    with daemon(socket, timeout) as client:
        drained = bool(_drained(client.get("/v1/engines")["engines"], engine))
        document = client.post(_route("undrain", engine))
    _told(document, output, "requests are admitted again" if drained else "nothing was drained")


@click.command()
@for_option("How long; then kvctl enforces again.")
@click.option("--reason", required=True, help="Why; it is kept in the audit log.")
@yes_option
@output_option
@talks_to_daemon
def bypass(*, ttl: float, reason: str, yes: bool, output: str, socket: Path | None, timeout: float) -> None:
    """Let everything in, and go on counting: the way out when kvctl itself is suspected.

    What would have been refused is in the decision log, with shadow set. A bypass ends by itself.

    Example: kvctl bypass --for 15m --reason "refusals on an idle engine?"
    """
    confirm(f"For {span(ttl)} nothing protects the engine from overload. Go on?", yes=yes)
    with daemon(socket, timeout) as client:
        document = client.post("/v1/bypass", {"ttl_s": ttl, "reason": reason})
    _told(document, output, _BYPASSED.get(document["mode"], ""))


@click.command()
@output_option
@talks_to_daemon
def resume(output: str, socket: Path | None, timeout: float) -> None:
    """End a bypass: kvctl enforces its limits again."""
    with daemon(socket, timeout) as client:
        document = client.post("/v1/resume")
    _told(document, output, _RESUMED.get(document["mode"], ""))


def _until_idle(client: AdminClient, timeout: float, engine: str | None) -> None:
    """Raises TimedOutError."""

    def running() -> int:
        engines = client.get("/v1/engines")["engines"]
        return sum(each["leases"] for name, each in engines.items() if engine in (None, name))

    until = time.monotonic() + timeout
    while leases := running():
        if time.monotonic() >= until:
            text = f"{leases} requests still run after {timeout:g} s; nothing new is admitted meanwhile"
            raise TimedOutError(f"{text}: wait longer with --timeout, or kvctl undrain")
        time.sleep(_PEEK_S)


def _drained(engines: Mapping[str, Any], engine: str | None) -> list[str]:
    return [name for name, each in engines.items() if engine in (None, name) and each["draining"]]


def _words(it: Mapping[str, Any], meaning: str) -> Iterator[str]:
    life = f" for {span(it['left_s'])}" if it.get("left_s") else ""
    which = f" (engine {it['engine']} changed)" if "engine" in it else ""
    yield it["mode"] + life + which + (f": {meaning}" if meaning else "")


def _told(document: Mapping[str, Any], output: str, meaning: str) -> None:
    """Print the answer; ``meaning``: what follows from the mode."""
    answer(document, output, lambda it: _words(it, meaning))
    if not document["kept"]:
        click.echo(_LOST, err=True)
