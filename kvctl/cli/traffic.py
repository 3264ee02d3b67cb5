"""``kvctl drain`` and ``undrain``."""

from pathlib import Path

import click

from kvctl.cli.common import daemon, emit, output_option, talks_to_daemon


@click.command()
@output_option
@talks_to_daemon
def drain(output: str, socket: Path | None, timeout: float) -> None:
    """Admit nothing new; what runs goes on. New requests get 503 and /readyz says no."""
    _traffic("/v1/drain", output, socket, timeout)


@click.command()
@output_option
@talks_to_daemon
def undrain(output: str, socket: Path | None, timeout: float) -> None:
    """Admit again."""
    _traffic("/v1/undrain", output, socket, timeout)


def _traffic(route: str, output: str, socket: Path | None, timeout: float) -> None:
    with daemon(socket, timeout) as client:
        document = client.post(route)
    if output == "json":
        emit(document)
    else:
        click.echo(document["mode"])
