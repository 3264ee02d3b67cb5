"""Asks the engine for a few counts whenever it came up, and compares the local tokenizer with them.

Law 4: a 400 needs proof, and a tokenizer of another model proves nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvctl import logs
from kvctl.core.events import Command, EngineRestarted, Noted
from kvctl.core.outcomes import Note

log = logs.get("tokens")

Verify = Callable[[str], Awaitable[int | None]]


class TokenizerCheck:
    """An observer of the gate. ``verify(model)`` answers how many probes differ, None: nothing to compare."""

    def __init__(self, verify: Verify, models: Callable[[], tuple[str, ...]]) -> None:
        self._verify = verify
        self._models = models
        self._task: asyncio.Task[None] | None = None
        self._wrong = False

    def __call__(self, command: Command) -> None:
        """Begin a check when the engine is another one than before."""
        described = isinstance(command, Noted) and command.word is Note.ENGINE_DESCRIBED
        if not (described or isinstance(command, EngineRestarted)) or not self._models():
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._check(), name="kvctl-tokenizer-check")

    async def close(self) -> None:
        """Stop a check that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _check(self) -> None:
        try:
            wrong = await self._verify(self._models()[0])
        except Exception:
            log.exception("comparing the tokenizer with the engine failed")
            return
        if wrong is None:
            return
        before, self._wrong = self._wrong, wrong > 0
        if wrong:
            sentence = (
                f"the tokenizer is not the engine's: {wrong} probes count otherwise; "
                "the engine's /tokenize counts until they agree. Check the setting tokenizer"
            )
            logs.event(log, logging.WARNING, "tokenizer_doubted", sentence)
        elif before:
            logs.event(
                log, logging.INFO, "tokenizer_trusted", "the tokenizer counts as the engine does again"
            )
