"""``kvctl plan``: the KV pool of a model on a card, before anything is rented or started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvctl.cli.common import FAILED, USAGE, CommandError, emit
from kvctl.cli.plan_inputs import Inputs, UnansweredError, inputs_of, variant
from kvctl.cli.plan_options import with_options
from kvctl.cli.terminal import harmless
from kvctl.plan import Plan, PlanError, as_document, as_toml, make_plan
from kvctl.plan.flag_text import flags_text

_STANDARD_OUTPUT = "-"


@click.command()
@with_options
def plan(
    *, explain: bool, compare: tuple[str, ...], recommend: str | None, output: str, **given: Any
) -> None:
    """How many KV tokens a model has on a card: pool, concurrency by context length, and what decides.

    All sizes are of one GPU. Without --available-gib the memory is an interval, and so is the pool.
    """
    try:
        first = inputs_of(given)
        plans = [_plan(each) for each in (first, *(variant(first, text) for text in compare))]
        if recommend is not None:
            _write(recommend, _settings(plans[0], given))
        if recommend == _STANDARD_OUTPUT:
            return  # the file alone, so that it can be piped
        _show(first, plans, compare, explain=explain, output=output)
    except PlanError as error:
        status = FAILED if isinstance(error, UnansweredError) else USAGE
        raise CommandError(" ".join(str(error).split()), status) from None


def _plan(inputs: Inputs) -> Plan:
    return make_plan(inputs.model, inputs.flags, inputs.memory, inputs.spec)


def _settings(made: Plan, given: Mapping[str, Any]) -> str:
    """The settings file, with what lets the daemon make this plan again."""
    context = click.get_current_context()
    typed = {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    folder = given["config"]
    return as_toml(
        made,
        given["like"] or "http://127.0.0.1:8000",
        plan_model="" if folder is None else str(folder.resolve()),
        plan_flags=flags_text(typed),
    )


def _show(first: Inputs, plans: list[Plan], compare: tuple[str, ...], *, explain: bool, output: str) -> None:
    from kvctl.cli import plan_show  # noqa: PLC0415 - json needs none of it

    check = None if first.live is None else first.live.compare(plans[0]).document()
    if output == "json":
        documents = [as_document(each, explain=explain) for each in plans]
        document = documents[0]
        if check is not None:
            document["engine_reports"] = check
        if compare:
            document["compare"] = [
                {"variant": text, **each} for text, each in zip(compare, documents[1:], strict=True)
            ]
        emit(document)
        return
    parts = [plan_show.report(plans[0])]
    if check is not None:
        parts.append(f"cross-check: {check['sentence']}")
    if compare:
        parts.append(plan_show.side_by_side(["as given", *compare], plans))
    if explain:
        parts.append(plan_show.explanation(plans[0]))
    lines = "\n\n".join(parts).split("\n")
    click.echo("\n".join(map(harmless, lines)))  # an engine's or a file's names are in it


def _write(target: str, text: str) -> None:
    """The settings file; an existing one is never overwritten."""
    if target == _STANDARD_OUTPUT:
        click.echo(text, nl=False)
        return
    try:
        with Path(target).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{target}: not written: {error.strerror or error}") from None
    click.echo(f"wrote {target}", err=True)
