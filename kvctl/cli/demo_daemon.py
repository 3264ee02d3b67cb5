"""``python -m kvctl.cli.demo_daemon``: the real daemon, except that its card is a file.

``kvctl serve`` takes no simulated card: nobody should use one in front of a real engine by mistake.
"""

import os
from collections.abc import Callable
from pathlib import Path

import click
import uvloop

from kvctl import logs
from kvctl.gpu.simulated import FollowedCard
from kvctl.process import serve
from kvctl.settings.loading import load
from kvctl.settings.model import Settings
from kvctl.sim.lifetime import stop_event


@click.command()
@click.option("--config", type=click.Path(path_type=Path), required=True)
@click.option("--card", type=click.Path(path_type=Path), required=True, help="The simulated card's file.")
def main(*, config: Path, card: Path) -> None:
    """Serve with the settings of CONFIG, reading CARD in place of NVML, until standard input ends."""
    settings = load(config, os.environ)
    handler = logs.start(settings.log_level, settings.log_format)
    try:
        uvloop.run(_serve(settings, card, lambda: load(config, os.environ)))
    finally:
        logs.stop(handler)


async def _serve(settings: Settings, card: Path, read: Callable[[], Settings]) -> None:
    await serve(settings, stop=stop_event(with_stdin=True), gpu_source=FollowedCard(card), read=read)


if __name__ == "__main__":
    main()
