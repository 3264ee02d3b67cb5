"""Asks the engine for a few counts whenever it comes up, and compares the local tokenizer with them.

Law 4: a 400 needs proof, and a tokenizer of another model proves nothing. Whatever makes the counter doubt
its tokenizer, or trust it again, is logged here; so is the end of a process that counts.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.core.events import Command, EngineRestarted, Noted
from kvctl.core.outcomes import Note
from kvctl.tokens.chain import ChainCounter

log = logs.get("tokens")


class TokenizerCheck:
    """An observer of the gate. ``models`` returns what the engine serves; ``engine`` is its name."""

    def __init__(self, counter: ChainCounter, models: Callable[[], tuple[str, ...]], engine: str) -> None:
        self._counter = counter
        self._models = models
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        counter.calibration.changed = self._changed
        if counter.own is not None:
            counter.own.lost = self._lost

    def __call__(self, command: Command) -> None:
        """Begin a check when the engine is another one than before."""
        described = isinstance(command, Noted) and command.word is Note.ENGINE_DESCRIBED
        restarted = isinstance(command, EngineRestarted)
        if not (described or restarted) or not self._models():
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(
            self._check(restarted=restarted), name="kvctl-tokenizer-check"
        )

    async def close(self) -> None:
        """Stop a check that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check(self, *, restarted: bool) -> None:
        own = self._counter.own
        try:
            wrong = await self._counter.verify(self._models()[0])
        except Exception:
            log.exception("comparing the tokenizer with the engine failed")
            return
        if wrong is None and restarted and self._counter.doubted:
            self._counter.calibration.trust("the engine is another one, and cannot be asked for counts")
        if own is not None and not own.keeps:
            sentence = "this tokenizer's counts do not add up at message borders: prompts are counted whole"
            logs.event(log, logging.INFO, "tokenizer_unsplittable", sentence, engine=self._engine)

    def _changed(self, why: str) -> None:
        if self._counter.doubted:
            sentence = (
                f"the tokenizer is not the engine's: {why}; the engine's /tokenize counts until they agree. "
                "Check the setting tokenizer"
            )
            logs.event(log, logging.WARNING, "tokenizer_doubted", sentence, engine=self._engine)
        else:
            sentence = f"the tokenizer counts as the engine does again: {why}"
            logs.event(log, logging.INFO, "tokenizer_trusted", sentence, engine=self._engine)

    def _lost(self, sentence: str) -> None:
        logs.event(log, logging.ERROR, "tokens_crashed", sentence, engine=self._engine)
