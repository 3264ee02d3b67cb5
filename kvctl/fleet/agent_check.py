r"""HAProxy's agent-check: a TCP connection gets one line and is closed.

    up ready 73%\n

The percentage is of the server's configured weight (``weight 100``). Every line says the whole of it: what
an agent has set, only the agent undoes. A full box says 1 %, not 0: at 0 HAProxy sends nobody, and when all
boxes are full its own 503 would take the place of the gate's 429 with its honest Retry-After.
"""

import asyncio
import logging
from collections.abc import Callable

from kvctl import logs
from kvctl.fleet.standing import Standing

log = logs.get("fleet")

LEAST_PERCENT = 1
MANY_AGENTS = 64  # connections at once; a check is over in a millisecond
PATIENCE_S = 2.0


def agent_line(standing: Standing) -> bytes:
    """The answer to one check."""
    percent = max(round(100 * standing.headroom_ratio), LEAST_PERCENT)
    if standing.draining:
        return b"up drain %d%%\n" % percent
    if not standing.serving:
        return f"down#{standing.reason or 'engine'}\n".encode()
    return b"up ready %d%%\n" % percent


class AgentServer:
    """Answers agent-checks on ``host:port``; ``standing()`` is asked for each."""

    def __init__(self, host: str | None, port: int, standing: Callable[[], Standing]) -> None:
        self._host, self._port = host, port
        self._standing = standing
        self._server: asyncio.Server | None = None
        self._open = 0

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server is not None else self._port

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._server = await asyncio.start_server(self._answer, self._host, self._port)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MANY_AGENTS:
                writer.write(agent_line(self._standing()))
                async with asyncio.timeout(PATIENCE_S):
                    await writer.drain()
        except (OSError, TimeoutError):
            logs.event(log, logging.DEBUG, "agent_gone", "an agent-check went away unanswered")
        finally:
            self._open -= 1
            writer.close()
