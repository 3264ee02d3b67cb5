"""``kvctl doctor``: what stands between this machine, the engine and a gate that decides well."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from kvctl.cli.common import (
    FAILED,
    Between,
    answer,
    config_option,
    output_option,
    paint,
    socket_option,
    table,
)

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


@click.command()
@config_option
@click.option("--live", is_flag=True, help="By the running daemon's settings, whatever the file says.")
@output_option
@socket_option
@click.option(
    "--timeout",
    type=Between(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for each answer of engine, cards and daemon.",
)
def doctor(*, config: Path | None, live: bool, output: str, socket: Path | None, timeout: float) -> None:
    """Check settings, engine, tokenizer, capacity, cards and this machine, with a remedy for what is amiss.

    Changes nothing, and works beside a running daemon. Exit status 1 if a check failed; warnings are none.
    """
    from kvctl.cli.doctor_run import examine, examine_live  # noqa: PLC0415 - --help needs none of it

    if live:
        findings = examine_live(socket, os.environ, timeout)
    else:
        findings = examine(config, socket, os.environ, timeout)
    failed = sum(each.mark == "fail" for each in findings)
    document = {"ok": not failed, "checks": [each.document() for each in findings]}
    answer(document, output, lambda it: _lines(it["checks"]))
    if failed:
        raise SystemExit(FAILED)


def _lines(checks: list[Mapping[str, str]]) -> Iterator[str]:
    rows = [{"CHECK": each["check"], "": each["result"], "FOUND": each["found"]} for each in checks]
    for line, each in zip(table(rows).splitlines()[1:], checks, strict=True):
        yield paint(line, fg=_COLOURS[each["result"]])
        if each["remedy"]:
            yield f"    -> {each['remedy']}"
    found = Counter(each["result"] for each in checks)
    count = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
    yield ""
    yield f"{count}: {found['fail']} failed, {found['warn']} with a warning"
