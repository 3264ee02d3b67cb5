"""``kvctl explain``: why a request was refused or let in, or what one like this would get now."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from kvctl.cli.common import answer, brief, count, daemon, output_option, percent, talks_to_daemon

Document = Mapping[str, Any]

_REASONS = {
    "kv_budget": "with it the forecast peak would pass the KV budget",
    "too_large_now": "by itself it is larger than the KV budget: it runs only alone",
    "prefill_backlog": "the prompts before it take longer than its first token may",
    "decode_concurrency": "one more sequence would slow down every answer's tokens",
    "sequence_slots": "the engine runs as many sequences as it has slots for",
    "context": "it is beyond the engine's context length, always",
    "max_context": "it is beyond the operator's max_context, always",
    "capacity": "it is beyond the engine's whole KV pool, always",
    "draining": "kvctl is drained",
    "rank_gone": "it waited for a data-parallel rank that the engine no longer has",
    "queue_ahead": "it would delay one that waits before it",
    "queue_deadline": "it waited, and its start did not come in time",
    "tenant_share": "the room is owed to tenants below their share",
    "tenant_tokens_in_flight": "its tenant holds as many KV tokens as it may",
    "tenant_requests_per_minute": "its tenant has sent as many requests this minute as it may",
    "tenant_tokens_per_minute": "its tenant has asked for as many tokens this minute as it may",
    "background_responses": "as many are generated in the background as may be at once",
}


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option("--prompt-tokens", type=click.IntRange(0), help="Of a request that is only thought of.")
@click.option("--max-tokens", type=click.IntRange(0), help="Its limit of output. [none sent]")
@click.option("--n", "choices", type=click.IntRange(1, 1024), default=1, show_default=True, help="Answers.")
@click.option("--model", default="", help="The model that it asks for. [any]")
@click.option("--route", default="", help="The route's name, as in metrics.")
@click.option("--tenant", default="", help="Whose it would be.")
@click.option("--stream", is_flag=True, help="Whether it streams.")
@output_option
@talks_to_daemon
def explain(
    *,
    request_id: str | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    choices: int,
    model: str,
    route: str,
    tenant: str,
    stream: bool,
    output: str,
    socket: Path | None,
    timeout: float,
) -> None:
    """Why the request ID was refused or let in; or what one of this shape would get now, charging nothing.

    ID is the X-Request-Id among the answer's headers, a lease id, or the id in the body of vLLM's answer.

    Example: kvctl explain a87b5ccae911-163

    Example: kvctl explain --prompt-tokens 6000 --max-tokens 800
    """
    if (request_id is None) == (prompt_tokens is None):
        raise click.UsageError("Give the ID of a request, or --prompt-tokens of one that is only thought of.")
    with daemon(socket, timeout) as client:
        if request_id is not None:
            told = client.get(f"/v1/decisions/{quote(request_id, safe='')}")
            answer(told, output, story)
            return
        asked = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "n": choices, "model": model}
        asked |= {"route": route, "tenant": tenant, "stream": int(stream)}
        given = {key: value for key, value in asked.items() if value not in (None, "")}
        seen = client.get(f"/v1/outlook?{urlencode(given)}")
    answer(seen, output, outlook)


def story(it: Document) -> Iterator[str]:
    """A decision of the log, with its end and what would have had to be different."""
    yield f"{it['id']}  {it['time']}  {it['route']} on {it['engine']}"
    yield f"asked   {_asked(it)}"
    yield from _verdict(it)
    if it["retry_after_s"] is not None:
        yield f"told    to come back after {it['retry_after_s']:g} s"
    ended = it["ended"]
    if it["decision"] == "queue":
        yield "waits   still" if ended is None else f"left    the queue after {brief(ended['seconds'])}"
    elif ended is not None:
        yield (
            f"ended   {ended['end']} after {brief(ended['seconds'])}: {count(ended['output_tokens'])} output "
            f"tokens, {count(ended['held_tokens'])} KV tokens held of {count(it['claim_tokens'])} claimed"
        )
    elif it["decision"] == "admit":
        yield "ended   not yet: it runs"


def outlook(seen: Document) -> Iterator[str]:
    """What each engine would say now."""
    for name, it in seen["engines"].items():
        yield f"{name}  now"
        yield f"asked   {_asked(it)}"
        yield from _verdict(it)
        if it["retry_after_s"] is not None:
            yield f"when    in about {brief(it['retry_after_s'])}, at the pace of the last seconds"
        elif it["decision"] == "reject_later":
            yield "when    nobody can say yet: too few answers have ended in the last seconds"


def _asked(it: Document) -> str:
    limit = "no limit" if it["asked_output"] is None else f"max_tokens {count(it['asked_output'])}"
    allowed = "" if it["allowed_output"] is None else f", {count(it['allowed_output'])} allowed"
    many = f", n = {it['n']}" if it["n"] > 1 else ""
    return f"{count(it['prompt_tokens'])} prompt tokens, {limit}{allowed}{many}"


def _verdict(it: Document) -> Iterator[str]:
    reason = it["reason"]
    if reason is None:
        yield "said    admit" + (
            ": nothing else ran, though it is larger than the budget" if it["alone"] else ""
        )
    else:
        why = _REASONS.get(
            reason, "the engine served nobody" if it["decision"] == "unavailable" else "a limit"
        )
        word = "admit, unenforced:" if it["shadow"] else f"{it['decision']}:"
        yield f"said    {word} {reason}, {why}"
    if it["forecast_tokens"] is not None:
        yield (
            f"weighed forecast peak with it {_at_most(it)}{count(it['forecast_tokens'])} against a budget of "
            f"{count(it['budget_tokens'])}"
        )
        yield f"        ({_budget(it)}; {count(it['leases'])} in flight)"
        yield from _room(it)
    if it["starts_in_s"] is not None:
        yield f"waits   its start is foreseen {brief(it['starts_in_s'])} after it came"
    if it["waited_s"] > 0:
        yield f"waited  {brief(it['waited_s'])} in the queue"
    yield from _needed(it["remedies"])


def _at_most(it: Document) -> str:
    return "at most " if it.get("forecast_bounded") else ""


def _at_least(it: Document) -> str:
    return "at least " if it.get("forecast_bounded") else ""


def _room(it: Document) -> Iterator[str]:
    """What was free without it, as the caller was told, and what is left of that with it."""
    left, needed, free = it["headroom_tokens"], it["needed_tokens"], it.get("free_tokens")
    short = f"short by {count(-left)}" if left < 0 else f"{_at_least(it)}{count(left)} left"
    if needed is None:
        yield f"        {short} with it"
    elif free is None:
        yield f"        by itself it needed up to {count(needed)}; {short} with it"
    else:
        were = "none was" if free == 0 else f"{count(free)} were"
        yield f"        by itself it needed up to {count(needed)}, {were} free; {short} with it"


def _budget(it: Document) -> str:
    pressure = (
        f", pressure {it['pressure_ratio']:.2f} from {it['pressure_term']}" if it["pressure_term"] else ""
    )
    return f"capacity {count(it['capacity_tokens'])}, margin {percent(it['margin_ratio'])}{pressure}"


def _needed(remedies: list[str]) -> Iterator[str]:
    for at, each in enumerate(remedies):
        yield f"{'needed ' if at == 0 else '    or '} {each}"
