"""The gate's commands as log lines: one per change, none per request above debug."""

import logging

from kvctl import logs
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

_OURS = frozenset({EndReason.CANCELLED})  # ends that only a defect of kvctl brings about


def tell(command: Command, *, engine: str | None = None) -> None:
    """Log what ``command`` says, where it says something to on-call; ``engine``: whose, of several."""
    match command:
        case StateChanged():
            level = logging.INFO if command.after in SERVING - {EngineState.STALE} else logging.WARNING
            _say(engine, level, f"engine_{command.after}", command.sentence, before=command.before)
        case BudgetChanged():
            _say(
                engine,
                logging.INFO,
                f"budget_{command.reason}",
                command.sentence,
                before=command.before_tokens,
                after=command.after_tokens,
                reason=command.reason,
            )
        case EngineRestarted():
            _say(engine, logging.WARNING, "engine_restarted", "the engine restarted", rank=command.rank)
        case Noted():
            _say(engine, logging.INFO, command.word, command.sentence)
        case Reject():
            _refused(engine, command)
        case LeaseEnded() if command.record.reason in _OURS:
            sentence = f"request {command.record.lease.id} ended without a word: a defect, please report it"
            _say(engine, logging.ERROR, "lease_cancelled", sentence)
        case _:
            pass


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
