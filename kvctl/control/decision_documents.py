"""Decision records as JSON objects: the lines of the decision log file, and what the API answers.

docs/admin-api.md describes every key.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvctl.core.decisions import Asked, DecisionRecord, EndRecord, Entry, Scales, Story
from kvctl.core.hindsight import remedies
from kvctl.core.outcomes import Decision, EngineState, Policy, Pressure, RejectReason

Document = dict[str, Any]
VERSION = 1


def line(entry: Entry, wall: float) -> Document:
    """One line of the file; ``wall`` is the entry's time as seconds since the epoch."""
    shown = decision(entry, wall) if isinstance(entry, DecisionRecord) else end(entry, wall)
    return {"v": VERSION, "type": "decision" if isinstance(entry, DecisionRecord) else "end", **shown}


def decision(record: DecisionRecord, wall: float) -> Document:
    """A decision. Times in seconds, amounts in KV tokens; null: unknown, or not weighed."""
    asked, scales = record.asked, record.scales
    return {
        "time": stamp(wall),
        "at": round(record.at, 6),
        "engine": record.engine,
        "lease": asked.lease_id,
        "id": asked.request_id,
        "route": asked.route,
        "model": asked.model,
        "tenant": asked.tenant,
        "tenant_name": record.tenant_name,
        "prompt_tokens": asked.prompt_tokens,
        "prompts": list(asked.prompts),
        "n": asked.n,
        "asked_output": asked.asked_output,
        "allowed_output": record.allowed_output,
        "exact": asked.exact,
        "stream": asked.stream,
        "claim_tokens": record.claim_tokens,
        "needed_tokens": record.needed_tokens,
        "free_tokens": record.free_tokens,
        "forecast_tokens": None if record.forecast_tokens is None else round(record.forecast_tokens),
        "forecast_bounded": record.forecast_bounded,
        "headroom_tokens": record.headroom_tokens,
        "budget_tokens": scales.budget_tokens,
        "capacity_tokens": scales.capacity_tokens,
        "margin_ratio": scales.margin_ratio,
        "pressure_ratio": round(scales.pressure_ratio, 6),
        "pressure_term": scales.pressure_term,
        "policy": scales.policy,
        "state": scales.state,
        "draining": scales.draining,
        "leases": scales.leases,
        "binding_limit": record.binding_limit,
        "decision": record.decision,
        "reason": record.reason,
        "limit_tokens": record.limit_tokens,
        "largest_output": record.largest_output,
        "retry_after_s": None if record.retry_after_s is None else round(record.retry_after_s, 3),
        "alone": record.alone,
        "shadow": record.shadow,
        "waited_s": round(record.waited_s, 6),
        "starts_in_s": None if record.starts_in_s is None else round(record.starts_in_s, 3),
    }


def end(record: EndRecord, wall: float) -> Document:
    """An end of what was admitted."""
    first = record.first_token_s
    return {
        "time": stamp(wall),
        "at": round(record.at, 6),
        "engine": record.engine,
        "lease": record.lease_id,
        "id": record.request_id,
        "end": record.end,
        "seconds": round(record.seconds, 6),
        "first_token_s": None if first is None else round(first, 6),
        "output_tokens": record.output_tokens,
        "engine_prompt_tokens": record.prompt_tokens,
        "held_tokens": record.held_tokens,
    }


_END_KEYS = ("end", "seconds", "first_token_s", "output_tokens", "engine_prompt_tokens", "held_tokens")


def story(told: Story, wall_offset: float) -> Document:
    """A decision with its end (null while it runs), and what would have had to be different."""
    made = decision(told.decision, told.decision.at + wall_offset)
    over: Mapping[str, Any] | None = None
    if told.end is not None:
        shown = end(told.end, told.end.at + wall_offset)
        over = {key: shown[key] for key in _END_KEYS}
    return {**made, "ended": over, "remedies": remedies(told.decision)}


def story_of_lines(line: Mapping[str, Any], ended: Mapping[str, Any] | None) -> Document:
    """The same from two lines of the file. Raises KeyError, TypeError or ValueError for any other lines."""
    shown = {"free_tokens": None, "forecast_bounded": False, **line}
    del shown["v"], shown["type"]
    over = None if ended is None else {key: ended[key] for key in _END_KEYS}
    return {**shown, "ended": over, "remedies": remedies(_record(shown))}


def _record(line: Mapping[str, Any]) -> DecisionRecord:
    """The record of a decision's line, as far as the remedies depend on it."""
    term, reason = line["pressure_term"], line["reason"]
    return DecisionRecord(
        at=line["at"],
        engine=line["engine"],
        asked=Asked(
            lease_id=line["lease"],
            request_id=line["id"],
            route=line["route"],
            model=line["model"],
            tenant=line["tenant"],
            prompts=tuple(line["prompts"]),
            n=line["n"],
            asked_output=line["asked_output"],
            exact=line["exact"],
            stream=line["stream"],
        ),
        scales=Scales(
            state=EngineState(line["state"]),
            policy=Policy(line["policy"]),
            draining=line["draining"],
            capacity_tokens=line["capacity_tokens"],
            budget_tokens=line["budget_tokens"],
            margin_ratio=line["margin_ratio"],
            pressure_ratio=line["pressure_ratio"],
            pressure_term=None if term is None else Pressure(term),
            leases=line["leases"],
        ),
        decision=Decision(line["decision"]),
        reason=None if reason is None else RejectReason(reason),
        allowed_output=line["allowed_output"],
        needed_tokens=line["needed_tokens"],
        forecast_tokens=line["forecast_tokens"],
        limit_tokens=line["limit_tokens"],
        largest_output=line["largest_output"],
    )


def encoded(document: Mapping[str, Any] | list[Document]) -> bytes:
    """A document as JSON in one line; also with lone surrogates, which UTF-8 cannot encode."""
    try:
        return _ENCODER.encode(document)
    except UnicodeEncodeError:
        return json.dumps(document, separators=(",", ":"), default=str).encode()


def _plain(value: object) -> int:
    """A count of prompt tokens may be more than a number (``tokens.begin.Tokens``)."""
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def stamp(wall: float) -> str:
    """A time of day in UTC, to the millisecond."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
