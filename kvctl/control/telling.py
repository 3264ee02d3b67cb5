"""The gate's commands as log lines: one per change, none per request above debug."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvctl import logs
from kvctl.control.gatekeeper import Interest
from kvctl.core.events import (
    BudgetChanged,
    Command,
    EngineRestarted,
    LeaseEnded,
    Noted,
    Reject,
    StateChanged,
)
from kvctl.core.outcomes import SERVING, EndReason, EngineState

log = logs.get("gate")

_OURS = frozenset({EndReason.CANCELLED})  # ends that only a defect of kvctl causes


def tellers(engine: str | None = None) -> list[Interest]:
    """The observers that log what concerns on-call. ``engine``: the name to log, if there are several."""
    return [(partial(teller, engine), (kind,)) for kind, teller in _TELLERS.items()]


def _say(engine: str | None, level: int, word: str, sentence: str, **fields: object) -> None:
    if engine is None:
        logs.event(log, level, word, sentence, **fields)
    else:
        logs.event(log, level, word, f"{engine}: {sentence}", engine=engine, **fields)


def _refused(engine: str | None, command: Reject) -> None:
    if log.isEnabledFor(logging.DEBUG):
        sentence = f"refused {command.request_id}: {command.reason}"
        needed, room = command.needed_tokens, command.headroom_tokens
        _say(engine, logging.DEBUG, f"refused_{command.reason}", sentence, needed=needed, headroom=room)


def _state(engine: str | None, command: StateChanged) -> None:
    level = logging.INFO if command.after in SERVING - {EngineState.STALE} else logging.WARNING
    _say(engine, level, f"engine_{command.after}", command.sentence, before=command.before)


def _budget(engine: str | None, command: BudgetChanged) -> None:
    _say(
        engine,
        logging.INFO,
        f"budget_{command.reason}",
        command.sentence,
        before=command.before_tokens,
        after=command.after_tokens,
        reason=command.reason,
    )


def _restarted(engine: str | None, command: EngineRestarted) -> None:
    _say(engine, logging.WARNING, "engine_restarted", "the engine restarted", rank=command.rank)


def _noted(engine: str | None, command: Noted) -> None:
    _say(engine, logging.INFO, command.word, command.sentence)


def _lease_ended(engine: str | None, command: LeaseEnded) -> None:
    if command.record.reason in _OURS:
        sentence = f"request {command.record.lease.id} ended without a word: a defect, please report it"
        _say(engine, logging.ERROR, "lease_cancelled", sentence)


_TELLERS: dict[type[Command], Callable[[str | None, Any], None]] = {
    StateChanged: _state,
    BudgetChanged: _budget,
    EngineRestarted: _restarted,
    Noted: _noted,
    Reject: _refused,
    LeaseEnded: _lease_ended,
}
