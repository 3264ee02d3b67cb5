"""Another log level for a while: what on-call raises at night goes back by itself.

It is kept in memory only: after a restart the settings apply.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvctl import logs
from kvctl.core.overrides import DEFAULT_TTL_S, LEAST_TTL_S, OverrideError, Refusal

log = logs.get("admin")
LEVELS = ("debug", "info", "warning", "error")


class LogLevels:
    """``usual()`` returns the level of the settings."""

    def __init__(self, usual: Callable[[], str], ttl_max_s: Callable[[], float]) -> None:
        self._usual = usual
        self._ttl_max_s = ttl_max_s
        self._until: float | None = None
        self._back: asyncio.TimerHandle | None = None

    def document(self) -> dict[str, Any]:
        """The level in force, and for how long (null: it is that of the settings)."""
        left = None if self._until is None else max(self._until - asyncio.get_running_loop().time(), 0.0)
        return {"level": self._level(), "left_s": None if left is None else round(left, 3)}

    def set(self, level: object, ttl_s: object = DEFAULT_TTL_S) -> dict[str, Any]:
        """Log at ``level`` for ``ttl_s`` seconds. Raises OverrideError."""
        if level not in LEVELS:
            raise OverrideError(Refusal.OUT_OF_BOUNDS, f"{level!r:.50} is not one of {', '.join(LEVELS)}")
        most = self._ttl_max_s()
        if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not LEAST_TTL_S <= ttl_s <= most:
            raise OverrideError(
                Refusal.BAD_TTL, f"{ttl_s!r:.50} is no life of {LEAST_TTL_S:g} s to {most:g} s"
            )
        self._forget()
        loop = asyncio.get_running_loop()
        self._until = loop.time() + ttl_s
        self._back = loop.call_later(ttl_s, self.reset)
        logging.getLogger(logs.ROOT).setLevel(str(level).upper())
        return self.document()

    def reset(self) -> None:
        """Return to the level of the settings."""
        was_moved = self._until is not None
        self._forget()
        logging.getLogger(logs.ROOT).setLevel(self._usual().upper())
        if was_moved:
            logs.event(log, logging.INFO, "log_level_back", f"the log level is {self._usual()} again")

    def settle(self) -> None:
        """Apply the settings' level, which may have changed, unless on-call has set one for a while."""
        if self._until is None:
            self.reset()

    def close(self) -> None:
        """Leave no timer behind."""
        self._forget()

    def _forget(self) -> None:
        self._until = None
        if self._back is not None:
            self._back.cancel()
            self._back = None

    def _level(self) -> str:
        return logging.getLevelName(logging.getLogger(logs.ROOT).getEffectiveLevel()).lower()
