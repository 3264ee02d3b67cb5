"""Comments in silent event streams, for intermediaries that cut what is silent (``stream_heartbeat``).

Law 5: bytes pass unchanged; a comment stands between two whole events, where every reader skips it, and only
where the operator asked for it.
"""

import asyncio

from kvctl.proxy.flow import Relayed

_COMMENT = b": keep-alive\n\n"


class Heartbeat:
    """Comments on one answer's stream after each ``seconds`` of silence, until closed."""

    __slots__ = ("_half", "_loop", "_relayed", "_silent", "_timer")

    def __init__(self, relayed: Relayed, seconds: float) -> None:
        self._relayed = relayed
        self._half = seconds / 2
        self._loop = asyncio.get_running_loop()
        relayed.stream.stirred = False
        self._silent = 0  # halves of the time
        self._timer = self._loop.call_later(self._half, self._look)

    def close(self) -> None:
        """No more."""
        self._timer.cancel()

    def _look(self) -> None:
        stream = self._relayed.stream
        self._silent = 0 if stream.stirred else self._silent + 1
        if self._silent >= 2 and self._relayed.at_border:
            stream.remark(_COMMENT)
            self._silent = 0
        stream.stirred = False
        self._timer = self._loop.call_later(self._half, self._look)
