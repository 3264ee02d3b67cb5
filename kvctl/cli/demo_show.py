"""Sets the demo's stage, shows the play while it runs, and prints its result."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from kvctl.cli.demo_picture import write_picture
from kvctl.cli.demo_run import Play, play
from kvctl.cli.demo_stage import GPU_POLL_S, StageError, open_stage
from kvctl.cli.demo_summary import summary, summary_table
from kvctl.cli.demo_view import make_view
from kvctl.cli.serve import raise_file_limit
from kvctl.core.outcomes import Policy
from kvctl.sim.load import calls

POLICIES = (Policy.NONE, Policy.STATIC, Policy.FORECAST)


class DemoError(RuntimeError):
    """The demo could not be run."""


def present(seconds: float, seed: int, *, as_json: bool, picture: Path | None = None) -> None:
    """Run the demo; its result goes to standard output, everything else to standard error.

    Raises DemoError if a part does not start, click.Abort if a signal ends it.
    """
    raise_file_limit()  # without a gate, callers pile up; what is started inherits the limit
    progress = Console(stderr=True)
    try:
        result = uvloop.run(_with_signals(lambda: _run(progress, seconds, seed)))
    except StageError as error:
        raise DemoError(str(error)) from error
    if result is None:
        raise click.Abort
    if picture is not None:
        _draw(result, picture)
    if as_json:
        click.echo(json.dumps(summary(result, GPU_POLL_S), indent=2))
    else:
        Console().print(summary_table(result))


def _draw(result: Play, picture: Path) -> None:
    try:
        write_picture(result, picture)
    except OSError as error:
        raise DemoError(f"--picture {picture}: {error.strerror}; the run itself went well") from error


async def _run(progress: Console, seconds: float, seed: int) -> Play:
    progress.print(f"starting {len(POLICIES)} simulated engines and daemons ...", highlight=False)
    async with open_stage(POLICIES) as stage:
        with make_view(progress) as view:
            return await play(stage, calls(seconds, seed), seconds, seed, view.show)


async def _with_signals(job: Callable[[], Coroutine[Any, Any, Play]]) -> Play | None:
    """Run ``job()``; TERM and INT cancel it, so that it takes down what it started. None then."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(job())
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None
