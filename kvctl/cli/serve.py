"""``kvctl serve``: the daemon, with a flag for every setting."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvctl.cli.common import FAILED, USAGE, CommandError, config_option
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
from kvctl.settings.model import SPECS, Settings

_REMEDIES = {  # of an address that cannot be had
    errno.EADDRINUSE: "stop what listens there (ss -ltnp names it), or set another address",
    errno.EADDRNOTAVAIL: "this machine has no such address (ip addr lists them)",
    errno.EACCES: "this user may not: set a place of its own, or a port from 1024 on",
}


def setting_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for every setting; values are judged by the settings, so that all places take the same forms."""
    for spec in reversed([each for each in SPECS.values() if not each.secret]):
        option = click.option(
            spec.flag, spec.attribute, metavar=spec.form.name.upper(), help=spec.field.description
        )
        command = option(command)
    return command


@click.command()
@config_option
@setting_flags
def serve(config: Path | None, **flags: str | None) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    One engine needs no file: kvctl serve --engine-url http://127.0.0.1:8000
    """
    given = {key: flags.get(spec.attribute) for key, spec in SPECS.items()}
    env = dict(os.environ)  # a reload reads the same: whoever is told by systemd gives its variables up

    def read() -> Settings:
        return load(config, env, given)

    try:
        settings = read()
    except SettingsError as error:
        raise CommandError(str(error), USAGE if error.usage else FAILED) from None
    raise_file_limit()
    _run(settings, read)


def _run(settings: Settings, read: Callable[[], Settings]) -> None:
    # --help and bad settings need none of these
    from kvctl.admin.listeners import ListenError  # noqa: PLC0415
    from kvctl.control.certificates import CertificateError  # noqa: PLC0415
    from kvctl.process import run  # noqa: PLC0415
    from kvctl.proxy.tenancy import KeysError  # noqa: PLC0415
    from kvctl.tokens.files import TokenizerError  # noqa: PLC0415

    try:
        run(settings, read)
    except (ListenError, TokenizerError, KeysError, CertificateError) as error:
        why = error.__cause__
        remedy = _REMEDIES.get(why.errno or 0) if isinstance(why, OSError) else None
        raise CommandError(f"{error}; {remedy}" if remedy else str(error)) from None


def raise_file_limit() -> None:
    """As many descriptors as this process may have: each request holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
