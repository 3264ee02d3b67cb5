"""``kvctl``: finds the verb and imports its module, and no other, so that every command starts at once."""

import errno
import io
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType

import click

from kvctl import __version__

# verb: (module, attribute, what it does)
VERBS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "serve": ("kvctl.cli.serve", "serve", "Run the daemon."),
        "demo": ("kvctl.cli.demo", "demo", "Everything at once, without GPU or engine."),
        "plan": ("kvctl.cli.plan", "plan", "The KV pool of a model on a card, before it is rented."),
        "status": ("kvctl.cli.status", "status", "What the daemon does and why."),
        "top": ("kvctl.cli.top", "top", "The live view."),
        "explain": ("kvctl.cli.explain", "explain", "Why a request was refused, or would be."),
        "events": ("kvctl.cli.events", "events", "Decisions and changes, as they happen."),
        "queue": ("kvctl.cli.queue", "queue", "Who waits."),
        "engines": ("kvctl.cli.engines", "engines", "Engines and ranks."),
        "gpu": ("kvctl.cli.gpu", "gpu", "The cards, and letting go of them."),
        "check": ("kvctl.cli.check", "check", "One line and a status for monitoring."),
        "set": ("kvctl.cli.knobs", "set_knob", "Override a knob for a while."),
        "unset": ("kvctl.cli.knobs", "unset_knob", "End an override."),
        "overrides": ("kvctl.cli.knobs", "list_overrides", "The overrides in force."),
        "drain": ("kvctl.cli.traffic", "drain", "Admit nothing new; what runs goes on."),
        "undrain": ("kvctl.cli.traffic", "undrain", "Admit again."),
        "bypass": ("kvctl.cli.traffic", "bypass", "Let everything in for a while."),
        "resume": ("kvctl.cli.traffic", "resume", "End a bypass."),
        "reload": ("kvctl.cli.reload", "reload", "Read the settings again."),
        "loglevel": ("kvctl.cli.levels", "loglevel", "More of the log, for a while."),
        "replay": ("kvctl.cli.replay", "replay", "A trace through this gate and others, simulated."),
        "doctor": ("kvctl.cli.doctor", "doctor", "What is amiss with settings, engine and machine."),
        "check-config": ("kvctl.cli.configuration", "check_config", "Judge the settings without starting."),
        "show-config": ("kvctl.cli.configuration", "show_config", "The settings, and where each came from."),
        "install-units": (
            "kvctl.cli.install_units",
            "install_units",
            "Units, dashboards and rules in place.",
        ),
        "support": ("kvctl.cli.support", "support", "One archive for a bug report."),
        "completion": ("kvctl.cli.completion", "completion", "Completion for a shell."),
        "version": ("kvctl.cli.configuration", "version", "The version of this command."),
    }
)

_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG})


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The verbs, as listed above."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The verb's command."""
        if cmd_name not in VERBS:
            return None
        module, attribute, _ = VERBS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that is meant; a misspelt one is told its neighbour."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = get_close_matches(args[0], VERBS, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of --help, without an import."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, _, text) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="kvctl %(version)s")
def cli() -> None:
    """Admission control by KV tokens in flight, in front of a self-hosted LLM engine.

    Exit status: 0 ok, 1 failed, 2 usage, 3 daemon unreachable, 4 refused by bounds or a stale revision,
    5 permission, 6 timed out.
    """


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's letters cannot show is spelt out
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="kvctl")
    except OSError as error:
        if error.errno not in _NOT_WRITTEN or error.filename is not None:
            raise
        sys.stdout = None  # nothing of it can be flushed at the end either
        sys.exit(f"kvctl: the answer could not be written to where it was sent: {error.strerror}")
