"""What the verbs share: options, the client, exit codes, tables."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from kvctl.admin.client import (
    AdminClient,
    ClientError,
    DeniedError,
    RefusedError,
    TimedOutError,
    UnreachableError,
)
from kvctl.cli.terminal import as_json, harmless, shown

F = TypeVar("F", bound=Callable[..., Any])

FAILED, USAGE, UNREACHABLE, REFUSED, DENIED, TIMED_OUT = 1, 2, 3, 4, 5, 6
_EXIT: Mapping[type[ClientError], int] = {
    UnreachableError: UNREACHABLE,
    RefusedError: REFUSED,
    DeniedError: DENIED,
    TimedOutError: TIMED_OUT,
}
SOCKET_VARIABLE = "KVCTL_ADMIN_SOCKET"


class CommandError(click.ClickException):
    """Ends the command with a text and one of the exit codes."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        setattr(self, "exit_code", exit_code)  # noqa: B010 - click declares it on the class

    def show(self, file: Any = None) -> None:
        """On standard error, line by line, as other tools do."""
        for line in self.message.splitlines():
            click.echo(f"kvctl: {harmless(line)}", file=file or sys.stderr)


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "jsonl"]),
    default="table",
    show_default=True,
    help="Form of the output.",
)
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),  # one that cannot be read is the settings' to tell
    help="Settings file. [KVCTL_CONFIG, else /etc/kvctl/kvctl.toml where there is one]",
)


class Between(click.FloatRange):
    """A number within bounds: infinity and what is no number lie within none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help=f"The daemon's admin socket. [{SOCKET_VARIABLE}, else admin_socket of the settings file]",
)
_timeout_option = click.option(
    "--timeout",
    type=Between(0.1, 3600),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the daemon.",
)


_watch_option = click.option(
    "--watch",
    type=Between(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    metavar="SECONDS",
    help="Again and again, every 2 seconds unless told.",
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


class _Span(click.ParamType[float]):
    """A time such as 30m."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        from kvctl.settings.units import duration  # noqa: PLC0415 - only commands with a time need it

        try:
            return duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}: write 90s, 30m or 2h", param, ctx)


def for_option(what: str, default: str = "30m") -> Callable[[F], F]:
    """``--for TIME``; the command gets it as ``ttl``, in seconds."""
    return click.option("--for", "ttl", type=_Span(), default=default, show_default=True, help=what)


def talks_to_daemon(command: F) -> F:
    """The options of a verb that calls the daemon: --socket and --timeout."""
    return socket_option(_timeout_option(command))


def looks_at_daemon(command: F) -> F:
    """The options of a verb that shows one of the daemon's documents, for ``look``."""
    return _watch_option(output_option(talks_to_daemon(command)))


@contextmanager
def daemon(socket: Path | None, timeout: float) -> Iterator[AdminClient]:
    """The daemon's API; errors end the command with their exit code, Ctrl-C with none."""
    try:
        yield AdminClient(socket or usual_socket(), timeout)
    except ClientError as error:
        lost = isinstance(error, UnreachableError) and socket is None
        told = [str(error), *(_settings_file_fault() if lost else ())]
        raise CommandError("\n".join(told), _EXIT.get(type(error), FAILED)) from None
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def _settings_file_fault() -> Iterator[str]:
    """Why the file, which may name another socket, was of no use."""
    if os.environ.get(SOCKET_VARIABLE):
        return
    from kvctl.settings.usual import faults_of_file  # noqa: PLC0415 - most calls need none of it

    for fault in faults_of_file(os.environ):
        yield f"{fault}\nso an admin_socket that it may set is not known here; name it with --socket"


def usual_socket() -> Path:
    """As the daemon would find it: environment, file, default."""
    if given := os.environ.get(SOCKET_VARIABLE):
        return Path(given)
    from kvctl.settings.usual import socket_of  # noqa: PLC0415 - most calls need none of it

    return socket_of(os.environ)


def emit(document: object, output: str = "json") -> None:
    """A document as JSON on standard output; ``jsonl``: in one line."""
    click.echo(as_json(document, indent=None if output == "jsonl" else 2))


def answer(document: object, output: str, lines: Callable[[Any], Iterable[str]]) -> None:
    """A document in the form that was asked for; ``lines`` makes the table of what may reach a terminal."""
    if output == "table":
        click.echo("\n".join(lines(shown(document))))
    else:
        emit(document, output)


def look(
    path: str,
    lines: Callable[[Any], Iterable[str]],
    *,
    watch: float | None,
    output: str,
    socket: Path | None,
    timeout: float,
) -> None:
    """Show the daemon's document at ``path``, or every ``watch`` seconds what it is by then."""

    def once() -> None:
        with daemon(socket, timeout) as client:
            document = client.get(path)
        answer(document, output, lines)

    _repeatedly(watch, output, once)


def _repeatedly(watch: float | None, output: str, once: Callable[[], None]) -> None:
    """``once``, or every ``watch`` seconds until the user has seen enough; a table takes the whole screen."""
    if watch is None:
        once()
        return
    try:
        while True:
            if output == "table" and sys.stdout.isatty():
                click.clear()
            once()
            time.sleep(watch)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def confirm(question: str, *, yes: bool) -> None:
    """Ask a person at a terminal; a script has thought about it before. Ends the command on a no."""
    if yes or not sys.stdin.isatty():
        return
    if not click.confirm(question, default=False, err=True):
        raise CommandError("nothing was changed")


def paint(text: str, **style: Any) -> str:
    """Coloured text, where there is a terminal and nobody set NO_COLOR."""
    return click.style(text, **style) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as columns under their names; numbers stand right."""
    if not rows:
        return ""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    right = {name for name in names if all(_is_number(row[name]) for row in rows)}

    def line(cells: Mapping[str, str]) -> str:
        places = (cells[n].rjust(widths[n]) if n in right else cells[n].ljust(widths[n]) for n in names)
        return "  ".join(places).rstrip()

    return "\n".join([line({name: name for name in names}), *map(line, rows)])


def _is_number(text: str) -> bool:
    return text in ("?", "-") or text[:1].isdigit() or (text[:1] == "-" and text[1:2].isdigit())


def count(value: float | None) -> str:
    """KV tokens and the like, with thousands apart; what is not known is a question mark."""
    return "?" if value is None else f"{round(value):,}"


def gib(amount: int | None) -> str:
    """Bytes of a card's memory; what is not known is a question mark."""
    return "?" if amount is None else f"{amount / 2**30:.1f} GiB"


def percent(value: float | None) -> str:
    """A share of one."""
    return "?" if value is None else f"{value * 100:.4g}%"


def brief(seconds: float) -> str:
    """A time that may be shorter than a second, as waits and answers are."""
    if seconds >= 10.0:
        return span(seconds)
    return f"{seconds:.2f} s" if 0.0 < seconds < 1.0 else f"{seconds:.1f} s"


def span(seconds: float) -> str:
    """A time in two units at most."""
    whole = round(seconds)
    for unit, size, next_unit, next_size in (("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // next_size
            return f"{whole // size} {unit}" + (f" {rest} {next_unit}" if rest else "")
    return f"{whole} s"
