"""``kvctl demo``: everything at once, without a GPU and without an engine.

Three simulated engines, each behind the real daemon with another policy (``none``, ``static``, ``forecast``),
get the same calls at the same moments. The engine is a 1.5B model with a 32,000-token pool on a shared card;
the calls burst past what it can serve (kvctl.sim.load says how), and in the middle a neighbour takes memory
of the card for a while. Time is real, and the lanes run side by side.
"""

from pathlib import Path

import click

from kvctl.cli.common import Between

SHORTEST_S, LONGEST_S = 5.0, 600.0


@click.command()
@click.option(
    "--seconds",
    type=Between(SHORTEST_S, LONGEST_S),
    default=30.0,
    show_default=True,
    help="Length of the run, 20 or more to compare; starting the parts takes a few seconds more.",
)
@click.option("--seed", default=1, show_default=True, help="Another seed is another load of the same kind.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the run into this SVG file."
)
def demo(*, seconds: float, seed: int, output: str, picture: Path | None) -> None:
    """Show what kvctl does: one load without a gate, with a static one, and with the forecast.

    Needs no GPU and no engine. What happens is shown live (on standard error), the comparison at the end.
    """
    from kvctl.cli.demo_show import DemoError, present  # noqa: PLC0415 - would slow the start of all other verbs

    try:
        present(seconds, seed, as_json=output == "json", picture=picture)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
