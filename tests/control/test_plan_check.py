"""The plan beside a running engine: compared where it reports a pool, counted on where it reports none."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from kvctl.control.plan_check import PlanCheck
from kvctl.control.planning import plan_source, smallest_card
from kvctl.control.poll import Poller
from kvctl.core.events import CapacityPlanned, EngineRestarted, Noted
from kvctl.core.outcomes import Note
from kvctl.core.telemetry import GpuSample
from kvctl.plan import Card, PlanError
from tests.plan.configs import LLAMA3_8B
from tests.test_serve import daemon, until

DESCRIBED = Noted(Note.ENGINE_DESCRIBED, "engine serves tiny")
INFO = (
    'vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}",'
    'kv_cache_size_tokens="{tokens}"}} 1\n'
)
SILENT = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
MEMORY = "--gpu 24GiB --weights-gib 16 --overhead-gib 2"  # 49,152 tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    return folder


@asynccontextmanager
async def engine(*pages: str) -> AsyncIterator[str]:
    """Answers each ask for metrics with the next page, the last one again and again; "" is a 404."""
    left = list(pages)

    async def metrics(_: web.Request) -> web.Response:
        page = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(text=page, status=200 if page else 404)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 8192}]})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


class Checked:
    """A check before an engine; ``figures`` are those it told the gate."""

    def __init__(self, url: str, model: Path, flags: str, cards: Sequence[Card | None] = (None,)) -> None:
        source = plan_source(model, "engine", flags)
        assert source is not None
        self._cards = list(cards)
        self.figures: list[int | None] = []
        self._news = asyncio.Event()
        self.check = PlanCheck(source, Poller(url, timeout_s=60.0), self._card, self._take, pause_s=0.01)

    def _card(self) -> Card | None:
        return self._cards.pop(0) if len(self._cards) > 1 else self._cards[0]

    def _take(self, event: CapacityPlanned) -> None:
        self.figures.append(event.tokens)
        self._news.set()

    async def told(self, command: Noted | EngineRestarted = DESCRIBED) -> int | None:
        """The figure that follows ``command``."""
        self._news.clear()
        self.check(command)
        async with asyncio.timeout(60):
            await self._news.wait()
        return self.figures[-1]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_pool_as_planned_is_one_quiet_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with engine(INFO.format(blocks=3072, tokens=49_152)) as url:
        checked = Checked(url, model, MEMORY)
        assert await checked.told() == 49_152 - 16
        await checked.check.close()
    assert warnings_of(caplog) == []
    assert "as planned" in caplog.text


@pytest.mark.parametrize(("blocks", "tokens"), [(1000, 16_000), (3072, 24_576), (6000, 96_000)])
async def test_another_pool_is_one_warning_for_each_start(
    model: Path, caplog: pytest.LogCaptureFixture, blocks: int, tokens: int
) -> None:
    """Too few blocks for the card; blocks that hold half of what they should; too many."""
    async with engine(INFO.format(blocks=blocks, tokens=tokens)) as url:
        checked = Checked(url, model, MEMORY)
        await checked.told()
        assert len(warnings_of(caplog)) == 1
        assert f"{tokens:,} KV tokens" in warnings_of(caplog)[0]
        checked.check(Noted(Note.CAPACITY, "not a start"))
        await checked.told(EngineRestarted("0"))
        await checked.check.close()
    assert len(warnings_of(caplog)) == 2


@pytest.mark.parametrize("page", [SILENT, ""])
async def test_an_engine_without_a_pool_is_planned(
    model: Path, caplog: pytest.LogCaptureFixture, page: str
) -> None:
    async with engine(page) as url:
        checked = Checked(url, model, MEMORY)
        assert await checked.told() == 49_152 - 16
        await checked.check.close()
    (warning,) = warnings_of(caplog)
    assert "49,136 KV tokens a rank by the plan's low end" in warning


async def test_the_card_is_waited_for(model: Path) -> None:
    async with engine(SILENT) as url:
        card = Card("card", 24.0, seen=True)
        checked = Checked(url, model, "--weights-gib 16 --overhead-gib 2", [None, None, card])
        assert await checked.told() == 49_152 - 16
        await checked.check.close()


async def test_no_card_is_no_plan_and_says_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(SILENT) as url:
        checked = Checked(url, model, "")
        assert await checked.told() is None
        await checked.check.close()
    (warning,) = warnings_of(caplog)
    assert "give --gpu" in warning


async def test_a_config_that_cannot_be_read_is_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "config.json").write_text("[]", encoding="utf-8")
    async with engine(SILENT) as url:
        checked = Checked(url, model, MEMORY)
        assert await checked.told() is None
        await checked.check.close()
    assert "cannot be planned" in warnings_of(caplog)[0]


def test_whose_plan_it_is(model: Path, tmp_path: Path) -> None:
    assert plan_source(None, "engine", MEMORY) is None
    assert plan_source(None, str(tmp_path), MEMORY) is None  # a folder without a config
    of_tokenizer = plan_source(None, str(model), MEMORY)
    assert of_tokenizer is not None
    assert (of_tokenizer.folder, of_tokenizer.needs_card) == (model, False)
    named = plan_source(model / "config.json", "bound", "--tp 2")
    assert named is not None
    assert (named.folder, named.needs_card, named.asked.flags.tp) == (model, True, 2)
    with pytest.raises(PlanError, match="--tpp"):
        plan_source(model, "engine", "--tpp 2")


def test_the_smallest_card_that_answers() -> None:
    def sample(uuid: str, gib: int | None, *, lost: bool = False) -> GpuSample:
        return GpuSample(
            uuid=uuid, at=0, total_bytes=None if gib is None else gib << 30, lost=lost, name=uuid
        )

    found = smallest_card([sample("a", 80), sample("b", 24), sample("c", None), sample("d", 8, lost=True)])
    assert found == Card("b", 24.0, seen=True)
    assert smallest_card([sample("c", None)]) is None


@pytest.mark.parametrize("page", [SILENT, "up 1\n"], ids=["without a pool", "--disable-log-stats"])
async def test_the_daemon_gates_on_the_plan_where_the_engine_is_silent(
    model: Path, tmp_path: Path, page: str
) -> None:
    async with (
        engine(page) as url,
        daemon(tmp_path, url, PLAN_MODEL=str(model), PLAN_FLAGS=MEMORY, GPUS="none") as it,
    ):
        await until(lambda: any("estimated by the planner" in line for line in it.lines()))
        assert any("by the plan's low end" in line for line in it.lines())
        shown = await it.metrics()
        assert f'kvctl_capacity_tokens{{engine="{url}"}} 49136' in shown
        assert f'kvctl_capacity_known{{engine="{url}"}} 0' in shown
        assert f'kvctl_capacity_source{{engine="{url}",source="plan"}} 1' in shown
        async with asyncio.timeout(120):
            while f'kvctl_budget_tokens{{engine="{url}"}} 46679' not in await it.metrics():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
