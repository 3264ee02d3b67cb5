"""Options that take a time such as 30m."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Span(click.ParamType[float]):
    """A time such as 30m."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        from kvctl.settings.units import duration  # noqa: PLC0415 - only commands with a time need it

        try:
            return duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}: write 90s, 30m or 2h", param, ctx)


def for_option(what: str) -> Callable[[F], F]:
    """``--for TIME``, 30 minutes unless told."""
    return click.option("--for", "ttl", type=Span(), default="30m", show_default=True, help=what)


reason_option = click.option("--reason", required=True, help="Why; it is kept in the audit log.")
