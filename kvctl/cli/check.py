"""``kvctl check``: one line and an exit status, as Nagios and its kin want them."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.admin.client import AdminClient, ClientError
from kvctl.cli.common import Between, talks_to_daemon, usual_socket
from kvctl.cli.terminal import harmless
from kvctl.core.outcomes import SERVING, EngineState

OK, WARNING, CRITICAL, UNKNOWN = range(4)
_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_SERVING = frozenset(str(state) for state in SERVING)
_PEEK_S = 0.5
_ENDS = {"draining": "undrain", "bypass": "resume"}

Finding = tuple[int, str]


@click.command()
@click.option(
    "--warning",
    "-w",
    type=Between(0, 1),
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Warn when less headroom than this share of the budget is left.",
)
@click.option(
    "--critical",
    "-c",
    type=Between(0, 1),
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="The same, critical.",
)
@click.option(
    "--max-age",
    type=Between(0),
    default=30.0,
    show_default=True,
    help="Warn when the engine's telemetry is older than this, in seconds.",
)
@click.option("--wait", is_flag=True, help="Until all is OK, or --timeout is over.")
@talks_to_daemon
def check(
    *, warning: float, critical: float, max_age: float, wait: bool, socket: Path | None, timeout: float
) -> None:
    """Judge the daemon: exit 0 OK, 1 warning, 2 critical, 3 unknown.

    Example: kvctl check -w 0.10 -c 0.02
    """
    client, until = AdminClient(socket or usual_socket(), timeout), time.monotonic() + timeout
    while True:
        code, line = judge(client, warning, critical, max_age)
        if code == OK or not wait or time.monotonic() >= until:
            break
        time.sleep(_PEEK_S)
    click.echo(harmless(line))
    raise SystemExit(code)


def judge(client: AdminClient, warning: float, critical: float, max_age: float) -> Finding:
    """The exit status and the line."""
    try:
        document = client.get("/v1/status")
    except ClientError as error:
        return UNKNOWN, f"KVCTL UNKNOWN - {error}"
    found = list(_findings(document, warning, critical, max_age))
    code = max((level for level, _ in found), default=OK)
    said = "; ".join(text for level, text in found if level == code) if code else document["sentence"]
    said = said.replace("|", "/")  # what comes after a bar are the figures
    return code, f"KVCTL {_WORDS[code]} - {said} | {' '.join(_figures(document))}"


def _findings(
    document: Mapping[str, Any], warning: float, critical: float, max_age: float
) -> Iterator[Finding]:
    if document["mode"] != "active":
        yield WARNING, f"kvctl is in mode {document['mode']}: kvctl {_ENDS[document['mode']]} ends it"
    if document.get("config", {}).get("problems"):
        yield WARNING, "the last reload was refused: kvctl reload says why"
    for name, gate in document["engines"].items():
        yield from _of_engine(name, gate, (warning, critical), max_age)


def _of_engine(
    name: str, gate: Mapping[str, Any], shares: tuple[float, float], max_age: float
) -> Iterator[Finding]:
    if gate["state"] not in _SERVING:
        yield CRITICAL, f"{name} is {gate['state']}: requests get 503"
        return
    if gate["state"] != EngineState.UP:
        yield WARNING, f"{name} is {gate['state']}"
    age = gate["telemetry_age_s"]
    if age is not None and age > max_age:
        yield WARNING, f"{name}: telemetry is {age:.0f} s old"
    left = gate["headroom_tokens"] / max(gate["budget_tokens"], 1)
    for level, share in ((CRITICAL, shares[1]), (WARNING, shares[0])):
        if left < share:
            yield level, f"{name}: headroom is {left:.1%} of the budget, below {share:.1%}"
            return


def _figures(document: Mapping[str, Any]) -> Iterator[str]:
    """Performance data; of several engines the sums."""
    gates = list(document["engines"].values())
    for label, key in (
        ("budget", "budget_tokens"),
        ("forecast", "forecast_peak_tokens"),
        ("headroom", "headroom_tokens"),
        ("leases", "leases"),
    ):
        yield f"{label}={sum(gate[key] for gate in gates):.0f}"
