import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvctl.engines.vllm import VLLM
from kvctl.sim.observed import Histogram, one_two_five
from kvctl.sim.scheduler import Sequence
from kvctl.sim.server import SimServer

MakeServer = Callable[..., Awaitable[SimServer]]


async def page_of(server: SimServer) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as response:
        return await response.text()


async def test_the_vllm_adapter_reads_the_page_in_full(make_server: MakeServer) -> None:
    server = await make_server(blocks=1000, block_size=32)
    body = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            await (await session.post(f"{server.url}/v1/completions", json=body)).read()
    (sample,) = VLLM().parse_metrics(await page_of(server), at=1.0)
    assert (sample.model, sample.rank, sample.unsupported) == ("sim", "0", None)
    assert (sample.capacity_tokens, sample.capacity_exact, sample.block_size) == (999 * 32, True, 32)
    assert (sample.running, sample.waiting, sample.kv_usage_ratio, sample.awake) == (0, 0, 0.0, True)
    assert (sample.generation_tokens_total, sample.prompt_tokens_total) == (27, 9)
    assert sample.preemptions_total == 0
    assert sample.prefix_caching is False
    assert sample.started_at == server.engine.started_at
    assert sample.output_lengths is not None
    assert sample.output_lengths.total == 3


async def test_gauge_is_relative_to_the_pool_without_the_null_block(make_server: MakeServer) -> None:
    server = await make_server(blocks=11, max_model_len=256)
    held = asyncio.Event()

    def stop(*_: object) -> None:
        """Within the step that makes the first token: there is no other."""
        server.engine.pause()
        held.set()

    server.engine.submit(Sequence(id="a", prompt=158, max_output=50, true_output=50), stop)
    await held.wait()
    (sample,) = VLLM().parse_metrics(await page_of(server), at=1.0)
    assert sample.kv_usage_ratio == 1.0
    assert sample.generation_tokens_total == 1


async def test_sleep_shows(make_server: MakeServer) -> None:
    server = await make_server()
    server.engine.sleep()
    (sample,) = VLLM().parse_metrics(await page_of(server), at=1.0)
    assert sample.awake is False
    server.engine.resume()
    (sample,) = VLLM().parse_metrics(await page_of(server), at=1.0)
    assert sample.awake is True


async def test_every_series_is_sound_prometheus_text(make_server: MakeServer) -> None:
    server = await make_server()
    families = list(text_string_to_metric_families(await page_of(server)))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.samples for family in families)


def test_histogram_counts_bounds_as_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 14.0


def test_token_buckets_are_those_of_vllm() -> None:
    assert one_two_five(8192) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
