"""``kvctl doctor``: what stands between this machine, the engine and a gate that decides well."""

import os
from pathlib import Path

import click

from kvctl.cli.common import FAILED, config_option, emit, output_option, paint, table

_COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


@click.command()
@config_option
@output_option
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 600),
    default=5.0,
    show_default=True,
    help="Seconds to wait for each answer of engine, cards and daemon.",
)
def doctor(config: Path | None, output: str, timeout: float) -> None:
    """Check settings, engine, tokenizer, capacity, cards and this machine, with a remedy for what is amiss.

    Changes nothing, and works beside a running daemon. Exit status 1 if a check failed; warnings are none.
    """
    from kvctl.cli.doctor_run import examine  # noqa: PLC0415 - --help needs none of it

    findings = examine(config, os.environ, timeout)
    failed = sum(each.mark == "fail" for each in findings)
    if output == "json":
        emit({"ok": not failed, "checks": [each.document() for each in findings]})
    else:
        rows = [{"CHECK": each.check, "": each.mark.value, "FOUND": each.text} for each in findings]
        for line, each in zip(table(rows).splitlines()[1:], findings, strict=True):
            click.echo(paint(line, fg=_COLOURS[each.mark]))
            if each.remedy:
                click.echo(f"    -> {each.remedy}")
        warned = sum(each.mark == "warn" for each in findings)
        checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
        click.echo(f"\n{checks}: {failed} failed, {warned} with a warning")
    if failed:
        raise SystemExit(FAILED)
