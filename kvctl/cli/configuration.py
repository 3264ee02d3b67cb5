"""``kvctl check-config``, ``show-config`` and ``version``: settings without a daemon."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvctl import __version__
from kvctl.cli.common import (
    FAILED,
    CommandError,
    answer,
    config_option,
    daemon,
    emit,
    output_option,
    table,
    talks_to_daemon,
)


@click.command()
def version() -> None:
    """The version of this command."""
    click.echo(f"kvctl {__version__}")


@click.command("check-config")
@config_option
@output_option
def check_config(config: Path | None, output: str) -> None:
    """Judge file, environment and credentials as a start would, and what of them this machine lacks."""
    # version needs none of these
    from kvctl.settings.errors import SettingsError  # noqa: PLC0415
    from kvctl.settings.loading import load  # noqa: PLC0415
    from kvctl.settings.surroundings import warnings  # noqa: PLC0415

    try:
        settings = load(config, os.environ)
    except SettingsError as error:
        if output == "table":
            raise CommandError(str(error)) from None
        emit({"ok": False, "problems": [str(problem) for problem in error.problems], "warnings": []}, output)
        raise SystemExit(FAILED) from None
    if (fault := _tokenizer_fault(settings.tokenizer)) is not None:
        if output == "table":
            raise CommandError(fault)
        emit({"ok": False, "problems": [fault], "warnings": []}, output)
        raise SystemExit(FAILED)
    found = list(warnings(settings))
    judged = {"ok": True, "problems": [], "warnings": found}
    answer(
        judged, output, lambda it: [*(f"warning: {each}" for each in it["warnings"]), "the settings are good"]
    )


def _tokenizer_fault(tokenizer: str) -> str | None:
    """Why a start with that tokenizer would fail; None: it would not. Reads the files as a start does."""
    from kvctl.tokens.files import TokenizerError  # noqa: PLC0415 - loads the tokenizers library
    from kvctl.tokens.load import load_counter  # noqa: PLC0415

    try:
        load_counter(tokenizer)
    except TokenizerError as error:
        return str(error)
    return None


@click.command("show-config")
@config_option
@click.option("--live", is_flag=True, help="The running daemon's, not those that a start would find.")
@output_option
@talks_to_daemon
def show_config(*, config: Path | None, live: bool, output: str, socket: Path | None, timeout: float) -> None:
    """The settings, and where each came from."""
    if live:
        with daemon(socket, timeout) as client:
            document = client.get("/v1/config")
    else:
        document = _local(config)
    answer(document, output, lambda it: [table([_row(key, each) for key, each in it["settings"].items()])])


def _local(config: Path | None) -> dict[str, Any]:
    from kvctl.settings.document import as_document  # noqa: PLC0415
    from kvctl.settings.errors import SettingsError  # noqa: PLC0415
    from kvctl.settings.loading import load  # noqa: PLC0415

    try:
        return as_document(load(config, os.environ))
    except SettingsError as error:
        raise CommandError(str(error)) from None


def _row(key: str, each: Mapping[str, Any]) -> dict[str, str]:
    return {
        "SETTING": key,
        "VALUE": each["text"] or '""',
        "ORIGIN": f"{each['origin']} {each['where']}".rstrip(),
    }
