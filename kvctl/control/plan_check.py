"""Plans the engine's pool whenever the engine comes up, compares it with what it reports, and tells the gate.

Law 4: a 400 needs proof, and a plan is none: it only stands in, ahead of the fallback, where the engine does
not tell its pool. Law 6: nothing slow on the loop: planning reads files, so it runs in a thread.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.control.planning import Judgement, PlanSource, judge
from kvctl.control.poll import Poller, PollError
from kvctl.control.reported import Reported, reported
from kvctl.core.events import CapacityPlanned, Command, EngineRestarted, Noted
from kvctl.core.outcomes import Note, SourceFault
from kvctl.plan import Card, PlanError, Verdict

log = logs.get("plan")

_ATTEMPTS = 10  # an engine that just came up may not answer everything yet, and cards are read once a second


class PlanCheck:
    """An observer of the gate. ``card()`` is the smallest card that was read, None while none was."""

    def __init__(
        self,
        source: PlanSource,
        poller: Poller,
        card: Callable[[], Card | None],
        emit: Callable[[CapacityPlanned], object],
        *,
        pause_s: float = 1.0,
    ) -> None:
        self._source = source
        self._poller = poller
        self._card = card
        self._emit = emit
        self._pause_s = pause_s
        self._task: asyncio.Task[None] | None = None

    def __call__(self, command: Command) -> None:
        """Begin a check when the engine is another one than before."""
        described = isinstance(command, Noted) and command.word is Note.ENGINE_DESCRIBED
        if not (described or isinstance(command, EngineRestarted)):
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._check(), name="kvctl-plan-check")

    async def close(self) -> None:
        """Stop a check that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._poller.close()

    async def _check(self) -> None:
        try:
            engine = await self._engine()
            if engine is None:
                return
            card = await self._waited_card()
            self._told(await asyncio.to_thread(judge, self._source, engine, card), engine)
        except PlanError as error:
            sentence = f"the engine's pool cannot be planned: {error}; set plan_model or plan_flags"
            logs.event(log, logging.WARNING, "plan_failed", sentence)
            self._emit(CapacityPlanned(None))
        except Exception:
            log.exception("planning the engine's pool failed")

    async def _engine(self) -> Reported | None:
        for _ in range(_ATTEMPTS):
            try:
                return await ask_engine(self._poller)
            except PollError as error:
                log.debug("the engine does not tell its pool yet: %s", error)
            await asyncio.sleep(self._pause_s)
        return None

    async def _waited_card(self) -> Card | None:
        for _ in range(_ATTEMPTS if self._source.needs_card else 0):
            if (card := self._card()) is not None:
                return card
            await asyncio.sleep(self._pause_s)
        return self._card()

    def _told(self, judgement: Judgement, engine: Reported) -> None:
        check = judgement.check
        if check is not None and check.verdict is not Verdict.AGREES:
            sentence = (
                f"{check.sentence}: another engine flag, dtype or a neighbour at its start? See kvctl doctor"
            )
            logs.event(log, logging.WARNING, "capacity_not_as_planned", sentence, verdict=check.verdict)
        elif check is not None:
            logs.event(log, logging.INFO, "capacity_as_planned", check.sentence)
        elif judgement.tokens is None:
            sentence = f"the engine reports no pool, and the plan has none: {judgement.note}"
            logs.event(log, logging.WARNING, "plan_failed", sentence)
        if engine.tokens is None and engine.blocks is None and judgement.tokens is not None:
            sentence = (
                f"the engine reports no pool: {judgement.tokens:,} KV tokens a rank by the plan's low end"
            )
            logs.event(log, logging.WARNING, "capacity_planned", sentence)
        self._emit(CapacityPlanned(judgement.tokens))


async def ask_engine(poller: Poller) -> Reported:
    """What the engine says of its pool. Raises PollError where nobody answers, PlanError for nonsense."""
    models, metrics, version = [await _body(poller, path) for path in ("/v1/models", "/metrics", "/version")]
    return reported(metrics or "", models, version)


async def _body(poller: Poller, path: str) -> str | None:
    """None where the engine has no such page."""
    try:
        return (await poller.get(path, "*/*")).body.decode(errors="replace")
    except PollError as error:
        if error.fault is SourceFault.HTTP_STATUS:
            return None
        raise
