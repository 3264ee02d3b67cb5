"""``kvctl replay``: a trace through the gate, other gates and the simulated engine, in virtual time."""

from pathlib import Path

import click

from kvctl.cli.common import FAILED, Between, CommandError, emit, output_option

USUAL_POLICIES = ("none", "static", "kv-gauge", "forecast", "clairvoyant")


@click.command()
@click.argument("trace", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A decision log instead of TRACE; repeat it for each rotated file.",
)
@click.option(
    "--engine", metavar="NAME", help="The engine whose decisions to take, where the log has several."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help=(
        "forecast, static, none, concurrency=N, kv-gauge, engine-queue=N, past-future or clairvoyant; N may"
        f" be 'best'. May be given often. [{', '.join(USUAL_POLICIES)}]"
    ),
)
@click.option(
    "--engine-profile",
    "profile",
    metavar="NAME|FILE",
    help=(
        "How long an engine step takes: 8b-24g, 8b-h200, 1.5b-shared, tiny-cpu, JSON with measured"
        " coefficients, or (of a log) measured. [8b-24g; of a log: measured]"
    ),
)
@click.option("--capacity-tokens", type=click.IntRange(32), help="KV pool. [the profile's]")
@click.option("--context", type=click.IntRange(16), help="Context length. [32768, at most the pool]")
@click.option("--rate", type=Between(0, min_open=True), help="Mean arrivals a second. [as recorded]")
@click.option(
    "--cap",
    metavar="exact|none|N",
    help=(
        "Output limit that callers send: what they will get, none at all, or a number."
        " [4096; of a log: as recorded]"
    ),
)
@click.option(
    "--margin",
    "margins",
    metavar="LIST",
    help=("The gate's margin; several, apart by commas, are compared: 5%,8%,12%. [5%; of a log: its last]"),
)
@click.option(
    "--prefix-caching/--no-prefix-caching",
    default=None,
    help="Prefix caching of the engine. [on with --shared-prefix, else off]",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Tokens of a common system prompt before every prompt.",
)
@click.option(
    "--prefix-sharing",
    default="auto",
    show_default=True,
    metavar="LIST",
    help="Whether the gate counts common prefixes once; auto,off compares both.",
)
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="First request.")
@click.option("--requests", type=click.IntRange(2), help="How many. [1500; of a log: all]")
@click.option("--ttft", type=Between(0, min_open=True), default=2.0, show_default=True, metavar="S")
@click.option("--itl", type=Between(0, min_open=True), default=0.1, show_default=True, metavar="S")
@click.option("--retries", type=click.IntRange(0, 10), default=2, show_default=True, help="Of each caller.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND[=VALUE][@S]",
    help="shift=4@60, bypass=0.3, freeze=10@60, restart=20@60 or neighbour=30@60. May be given often.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the callers' jitter.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write charts to this file.")
@output_option
def replay(**asked: object) -> None:
    """Replay TRACE (CSV, may be gzipped) or a decision log, and compare policies.

    With --log: what would have happened with another margin (kvctl replay --log FILE --margin 5%,8%,12%).
    Traffic, output limits and pool are the log's, the engine is as fast as its answers were, and "recorded"
    is what really happened.

    TRACE has the columns t_s, input_tokens, output_tokens and may have client_id. The policies forecast and
    static are the daemon's own gate. Goodput counts the requests that were served within --ttft seconds, from
    the first attempt, and --itl seconds per token; callers retry as openai-python does.
    """
    from kvctl.cli.replay_asked import Asked  # noqa: PLC0415
    from kvctl.cli.replay_run import compare  # noqa: PLC0415 - other verbs need none of it
    from kvctl.cli.replay_show import show_table  # noqa: PLC0415

    output, html = asked.pop("output"), asked.pop("html")
    try:
        found = compare(Asked(**asked))  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        raise CommandError(str(error), FAILED) from None
    if output == "table":
        show_table(found)
    else:
        emit(found.document(), str(output))
    if isinstance(html, Path):
        from kvctl.cli.replay_html import page  # noqa: PLC0415

        _write(page(found), html)


def _write(page: str, path: Path) -> None:
    """The figures are out by now: a place that takes no file costs nothing but the picture."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--html {path}: {error.strerror or error}", FAILED) from None
