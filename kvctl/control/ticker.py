"""The control loop's beat: one tick every ``interval_s``, never two for one late one."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvctl import logs
from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.events import Ticked

log = logs.get("control.ticker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """How one tick went. Seconds; ``lag_s`` is how late the event loop woke it."""

    tick_s: float
    lag_s: float
    overrun: bool


class Ticker:
    """Ticks every gate that there is at the time, and calls ``after`` each time with how it went."""

    def __init__(
        self, keepers: Callable[[], Iterable[Gatekeeper]], interval_s: float, after: Callable[[Beat], None]
    ) -> None:
        self._keepers = keepers
        self._interval = interval_s
        self._after = after
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tick."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-ticker")

    async def close(self) -> None:
        """Stop ticking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        clock = time.monotonic  # the loop's own time may be rounded to milliseconds
        due = clock()
        while True:
            due += self._interval
            await asyncio.sleep(max(due - clock(), 0.0))
            started = clock()
            self._tick()
            ended = clock()
            overrun = ended > due + self._interval
            self._tell(Beat(tick_s=ended - started, lag_s=max(started - due, 0.0), overrun=overrun))
            if overrun:
                due = ended  # missed ticks are not made up for: the next one sees the present anyway

    def _tick(self) -> None:
        """A tick that fails must not end the loop: the data plane would go on with a frozen budget."""
        for keeper in self._keepers():
            try:
                keeper.handle(Ticked())
            except Exception:
                log.exception("tick failed; the budget stays as it was")

    def _tell(self, beat: Beat) -> None:
        try:
            self._after(beat)
        except Exception:
            log.exception("telling of a tick failed")
