"""What engines say of themselves: asked on all their pages, and again where nothing else tells a change."""

from kvctl.control.poll import Poller
from kvctl.control.scraper import Scraper
from kvctl.core.events import EngineDescribed
from kvctl.core.telemetry import EngineInfo
from kvctl.engines.detect import ENGINES
from tests.engines.standins.core import Standin
from tests.engines.standins.llamacpp import LlamaCppStandin
from tests.engines.standins.sglang import SglangStandin
from tests.engines.standins.tgi import TgiStandin


class Watch:
    """A scraper of a stand-in, and what it emitted. ``now`` is its clock."""

    def __init__(self, engine: Standin) -> None:
        self.now = 0.0
        self.infos: list[EngineInfo] = []
        poller = Poller(engine.url, timeout_s=20, clock=lambda: self.now)
        self.scraper = Scraper(ENGINES[engine.name], poller, self._emit, info_interval_s=10.0)

    def _emit(self, event: object) -> None:
        if isinstance(event, EngineDescribed):
            self.infos.append(event.info)

    async def poll(self, after: float) -> None:
        self.now += after
        await self.scraper.poll()


async def test_a_pool_that_only_the_description_tells_is_asked_for_again() -> None:
    """A restart between two polls, with totals at zero before and after, shows nowhere else."""
    engine = LlamaCppStandin(slots=8, context=2000)
    async with engine.serving():
        watch = Watch(engine)
        await watch.poll(0.1)
        engine.slots = 3
        await watch.poll(5.0)
        assert [info.rank_capacity_tokens for info in watch.infos] == [16_000]
        await watch.poll(6.0)
        assert [info.rank_capacity_tokens for info in watch.infos] == [16_000, 6_000]
        await watch.scraper.close()


async def test_a_pool_that_the_page_tells_is_not() -> None:
    for engine in (TgiStandin(), SglangStandin()):
        async with engine.serving():
            watch = Watch(engine)
            for _ in range(5):
                await watch.poll(11.0)
            assert len(watch.infos) == 1
            await watch.scraper.close()


async def test_two_pages_make_one_description() -> None:
    engine = SglangStandin()
    async with engine.serving():
        watch = Watch(engine)
        await watch.poll(0.1)
        await watch.scraper.close()
    (info,) = watch.infos
    assert (info.context_tokens, info.rank_capacity_tokens, info.models) == (4096, 16_000, ("m",))
