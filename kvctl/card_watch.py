"""The cards of the whole daemon: one poller for each distinct setting ``gpus``, and each engine's share."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvctl.control.cards import CardPoller
from kvctl.control.engine_cards import AUTO, EngineCards
from kvctl.control.planning import smallest_card
from kvctl.core.events import Event, GpusRead
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading, GpuSource
from kvctl.gpu.faults import CardEvent
from kvctl.metrics import Metrics, SourceView
from kvctl.plan import Card

Gpus = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardNews:
    """Callbacks: for a card that is first seen, for the driver's messages, and for faults that begin."""

    seen: Callable[[str], object]
    happened: Callable[[CardEvent], object]
    failing: Callable[[SourceFault], object]


def news_to(metrics: Metrics, tell: Callable[[str, dict[str, Any]], object]) -> CardNews:
    """Callbacks that count for the metrics page; the driver's messages also go to listeners of happenings."""

    def happened(event: CardEvent) -> None:
        metrics.card_event(event)
        tell("gpu", {"kind": event.kind, "xid": event.xid, "sentence": event.sentence})

    return CardNews(seen=metrics.card_seen, happened=happened, failing=metrics.cards_failing)


class CardWatch:
    """All pollers. ``sources`` by the setting ``gpus``; None: nothing is watched for that setting."""

    def __init__(
        self,
        sources: Mapping[Gpus, GpuSource | None],
        interval_s: float,
        clock: Callable[[], float],
        news: CardNews,
    ) -> None:
        self._clock = clock
        self._news = news
        self._engines: dict[Gpus, list[EngineCards]] = {}
        self._by_name: dict[str, EngineCards] = {}
        self._seen: set[str] = set()
        self._pollers = {
            gpus: CardPoller(
                source,
                interval_s,
                partial(self._emit, gpus),
                happened=news.happened,
                failing=news.failing,
            )
            for gpus, source in sources.items()
            if source is not None
        }

    def __bool__(self) -> bool:
        """Whether anything is watched."""
        return bool(self._pollers)

    def add(self, name: str, gpus: Gpus, url: str, handle: Callable[[Event], object]) -> None:
        """An engine with that setting; ``handle`` takes what concerns its cards."""
        made = EngineCards(name, url, by_process=gpus == AUTO, handle=handle, clock=self._clock)
        self._engines.setdefault(gpus, []).append(made)
        self._by_name[name] = made

    def smallest(self, name: str) -> Card | None:
        """The smallest card of an engine; None while none was read."""
        return smallest_card(self._by_name[name].samples) if name in self._by_name else None

    def start(self) -> None:
        """Begin to read."""
        for poller in self._pollers.values():
            poller.start()

    async def close(self) -> None:
        """Stop polling and close every source."""
        await asyncio.gather(*(poller.close() for poller in self._pollers.values()))
        await asyncio.gather(*(each.close() for each in self._by_name.values()))

    def _emit(self, gpus: Gpus, event: Event) -> None:
        if isinstance(event, GpusRead):
            for sample in event.samples:
                self._see(sample)
        reading = self._pollers[gpus].latest or GpuReading()
        for engine in self._engines.get(gpus, ()):
            engine.take(event, reading)

    def _see(self, sample: GpuSample) -> None:
        if sample.uuid not in self._seen:
            self._seen.add(sample.uuid)
            self._news.seen(sample.uuid)

    # --- what is shown ------------------------------------------------------------------------------

    def reading(self) -> GpuReading | None:
        """Every card once, whoever reads it; a fault where any reading has one."""
        readings = [each.latest for each in self._pollers.values() if each.latest is not None]
        if not readings:
            return None
        samples = {sample.uuid: sample for reading in readings for sample in reading.samples}
        processes = {uuid: found for reading in readings for uuid, found in reading.processes.items()}
        faulty = next((each for each in readings if each.fault is not None), readings[0])
        return replace(faulty, samples=tuple(samples.values()), processes=processes)

    def engines_on(self) -> Mapping[str, tuple[str, ...]]:
        """By engine, the cards that count as its own."""
        return {name: each.uuids for name, each in self._by_name.items()}

    def remark(self) -> str:
        """How the cards explain slow answers; empty: they do not."""
        return "; ".join(dict.fromkeys(each.remark for each in self._pollers.values() if each.remark))

    def sources(self) -> list[SourceView]:
        """How each reading goes."""
        return [_view(poller) for poller in self._pollers.values()]

    def released_s(self) -> float | None:
        """Seconds for which the driver is still released; None: it is not."""
        return max((left for each in self._pollers.values() if (left := each.released_s)), default=None)

    async def release(self, seconds: float) -> None:
        """Release the driver for ``seconds``; 0: open it again."""
        if seconds > 0:
            await asyncio.gather(*(poller.release(seconds) for poller in self._pollers.values()))
            return
        for poller in self._pollers.values():
            poller.acquire()


def _view(poller: CardPoller) -> SourceView:
    reading = poller.latest
    if reading is None:
        return SourceView(up=False)
    return SourceView(up=reading.fault is None, read_at=poller.read_at, duration_s=reading.seconds)
