"""What engines say of themselves: asked on all their pages, and again where nothing else tells a change."""

import pytest

from kvctl.control.poll import Poller
from kvctl.control.scraper import Scraper
from kvctl.core.events import EngineDescribed, Scraped, ScrapeFailed
from kvctl.core.telemetry import EngineInfo
from kvctl.engines.detect import ENGINES
from tests.control.polled import FakeEngine, Watched, page, served, url
from tests.engines.standins.core import Standin
from tests.engines.standins.llamacpp import LlamaCppStandin
from tests.engines.standins.sglang import SglangStandin
from tests.engines.standins.tgi import TgiStandin
from tests.ports import free_port


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


async def test_description_is_asked_again_until_it_names_a_model() -> None:
    engine = FakeEngine(models='{"data":[]}')
    async with (
        served(engine.metrics, engine.model_list) as port,
        Watched(url(port), info_interval_s=0.0) as watched,
    ):
        await watched.scraper.poll()
        await watched.scraper.poll()
        engine.models = '{"data":[{"id":"tiny","max_model_len":8192}]}'
        for _ in range(3):
            await watched.scraper.poll()
        assert engine.asked.count("models") == 3
        described = [event.info.models for event in watched.events if isinstance(event, EngineDescribed)]
        assert described == [(), (), ("tiny",)]


@pytest.mark.parametrize("models", ["", "[]", "nonsense", "[" * 100_000, '{"data": 7}'])
async def test_odd_description_is_survived(models: str) -> None:
    engine = FakeEngine(models=models)
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        await watched.scraper.poll()
        assert watched.scraper.fault is None
        assert all(event.info.models == () for event in watched.events if isinstance(event, EngineDescribed))


async def test_description_comes_though_the_page_has_nothing() -> None:
    engine = FakeEngine(text="")
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        await watched.scraper.poll()
        assert [type(event) for event in watched.events] == [ScrapeFailed, EngineDescribed]


@pytest.mark.parametrize("after", [page(preempted=3), page(started="1.7959999e+09")])
async def test_description_is_asked_again_after_a_restart(after: str) -> None:
    """C16: counters that fall are another process, whose context is read again."""
    engine = FakeEngine()
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        await watched.scraper.poll()
        engine.text = page(preempted=500)
        await watched.scraper.poll()
        assert engine.asked.count("models") == 1
        engine.text = after
        await watched.scraper.poll()
        await watched.scraper.poll()
        assert engine.asked.count("models") == 2


async def test_description_is_asked_again_after_the_engine_was_away() -> None:
    engine, port = FakeEngine(), free_port()
    async with Watched(url(port)) as watched:
        await watched.scraper.poll()
        assert [type(event) for event in watched.events] == [ScrapeFailed]
        async with served(engine.metrics, engine.model_list, port=port):
            await watched.scraper.poll()
            await watched.scraper.poll()
        assert [type(event) for event in watched.events[1:]] == [Scraped, EngineDescribed, Scraped]
        await watched.scraper.poll()
        async with served(engine.metrics, engine.model_list, port=port):
            await watched.scraper.poll()
        assert [type(event) for event in watched.events[4:]] == [ScrapeFailed, Scraped, EngineDescribed]


async def test_two_processes_that_answer_in_turn_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """C18: two servers that answer in turn are noticed, told once, and not believed."""
    engine = FakeEngine()
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        for turn in range(8):
            engine.text = page(started="1.7e+09" if turn % 2 else "1.8e+09")
            await watched.scraper.poll()
        named = [event.samples[0].unsupported for event in watched.events if isinstance(event, Scraped)]
    assert named[:3] == [None] * 3
    assert named[-1] == "two processes with counters of their own answer in turn behind one address"
    assert caplog.text.count("answer in turn") == 1
    assert engine.asked.count("models") <= 4
