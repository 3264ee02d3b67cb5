"""The scraper against real servers on loopback that misbehave."""

import asyncio
import logging
import socket
import threading

import pytest
from aiohttp import web

from kvctl.control.poll import Poller
from kvctl.control.scraper import Scraper
from kvctl.core.events import EngineDescribed, Scraped, ScrapeFailed
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import RankSample
from kvctl.engines.vllm import VLLM
from tests.control.polled import (
    PAGE,
    PAGES,
    PATIENCE_S,
    Event,
    FakeEngine,
    Watched,
    raw,
    served,
    until,
    url,
)
from tests.ports import free_port


async def fault_of(port: int, **options: float) -> SourceFault | None:
    async with Watched(url(port), **options) as watched:  # type: ignore[arg-type]
        await watched.scraper.poll()
        (event, *_) = watched.events
        assert isinstance(event, ScrapeFailed)
        assert watched.scraper.failures == {event.fault: 1}
        assert watched.scraper.fault is event.fault
        assert watched.scraper.last_success_at is None
        return event.fault


async def test_samples_and_description() -> None:
    engine = FakeEngine()
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port) + "/") as watched:
        await watched.scraper.poll()
        scraped, described = watched.events
        assert isinstance(scraped, Scraped)
        assert isinstance(described, EngineDescribed)
        (sample,) = scraped.samples
        assert (sample.capacity_tokens, sample.running) == (31_968, 27)
        assert scraped.asked_at <= sample.at
        assert sample.at == watched.scraper.last_success_at
        assert (described.info.models, described.info.context_tokens) == (("tiny",), 8192)
        assert (watched.scraper.polls, watched.scraper.fault) == (1, None)
        assert (watched.scraper.last_duration_s or 0) > 0
        await watched.scraper.poll()
        assert engine.asked == ["metrics", "models", "metrics"]


async def test_authorization_is_sent() -> None:
    engine = FakeEngine()
    async with (
        served(engine.metrics, engine.model_list) as port,
        Watched(url(port), authorization="Bearer k") as watched,
    ):
        await watched.scraper.poll()
    assert engine.headers == ["Bearer k"]


class Recording(VLLM):
    """Notes in which threads pages are parsed."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        self.threads.append(threading.get_ident())
        return super().parse_metrics(page, at)


@pytest.mark.parametrize(("noise", "on_the_loop"), [("", True), ('other{le="1"} 1\n' * 20_000, False)])
async def test_large_page_is_parsed_off_the_loop(noise: str, on_the_loop: bool) -> None:
    """C09: a large page is parsed in a thread."""
    engine, adapter, events = FakeEngine(text=noise + PAGE), Recording(), list[Event]()
    async with served(engine.metrics, engine.model_list) as port:
        scraper = Scraper(adapter, Poller(url(port), timeout_s=PATIENCE_S), events.append)
        await scraper.poll()
        await scraper.close()
    assert isinstance(events[0], Scraped)
    assert events[0].samples[0].running == 27
    assert (adapter.threads == [threading.get_ident()]) is on_the_loop


# --- faults, each with its word -------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    assert await fault_of(free_port()) is SourceFault.REFUSED


async def test_slow_answer_times_out() -> None:
    """C24: a page that takes too long ends at the deadline."""
    engine = FakeEngine(delay_s=60)
    async with served(engine.metrics, engine.model_list) as port:
        assert await fault_of(port, timeout_s=0.05) is SourceFault.TIMEOUT


async def test_trickle_of_bytes_does_not_extend_the_deadline() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# more\n")
            await asyncio.sleep(0.01)

    async with served(trickle, FakeEngine().model_list) as port:
        assert await fault_of(port, timeout_s=0.1) is SourceFault.TIMEOUT


async def test_endless_page_is_cut_at_the_bound() -> None:
    """C09: past the size cap the poll fails as too large, and reading stops."""
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            sent += 1
            await response.write(b"x" * 65_536)

    async with served(endless, FakeEngine().model_list) as port:
        assert await fault_of(port) is SourceFault.TOO_LARGE
    assert sent < 1_000


@pytest.mark.parametrize("status", [204, 301, 401, 404, 500, 503])
async def test_other_status(status: int) -> None:
    """C07: 404 and other statuses are no telemetry."""
    engine = FakeEngine(status=status)
    async with served(engine.metrics, engine.model_list) as port:
        assert await fault_of(port) is SourceFault.HTTP_STATUS


async def test_redirect_is_not_followed() -> None:
    engine = FakeEngine()

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"http://{request.host}/v1/models"})

    async with served(elsewhere, engine.model_list) as port, Watched(url(port)) as watched:
        await watched.scraper.poll()
        assert watched.scraper.fault is SourceFault.HTTP_STATUS
    assert engine.asked == ["models"]  # asked by name, once


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", SourceFault.NO_SERIES),
        ((PAGES / "vllm-log-stats-off.prom").read_text(), SourceFault.NO_SERIES),
        ("<html></html>", SourceFault.UNPARSABLE),
        ("vllm:num_requests_running{ 1\n", SourceFault.UNPARSABLE),
    ],
)
async def test_page_without_telemetry(text: str, fault: SourceFault) -> None:
    """C07: 200 without a series of the engine is a failed poll, not usage 0."""
    engine = FakeEngine(text=text)
    async with served(engine.metrics, engine.model_list) as port:
        assert await fault_of(port) is fault


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", SourceFault.REFUSED),
        (b"\x16\x03\x01 garbage\r\n\r\n", SourceFault.UNPARSABLE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:", SourceFault.REFUSED),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nvllm:", SourceFault.REFUSED),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", SourceFault.UNPARSABLE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\xff", SourceFault.UNPARSABLE),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\xff",
            SourceFault.UNPARSABLE,
        ),
    ],
)
async def test_answer_that_is_none(answer: bytes, fault: SourceFault) -> None:
    """C07, C24: cut, garbled or compressed answers each have a word."""
    async with raw(answer) as port:
        assert await fault_of(port) is fault


async def test_what_is_no_http_is_described_and_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    async with raw(b"\x16\x03\x01 secret " + b"z" * 5000 + b"\r\n\r\n") as port:
        assert await fault_of(port) is SourceFault.UNPARSABLE
    assert "no HTTP" in caplog.text
    assert "secret" not in caplog.text


async def test_reset_in_the_middle() -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nvllm:", reset=True) as port:
        assert await fault_of(port) is SourceFault.REFUSED


async def test_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    async with Watched("http://engine.invalid:8000") as watched:
        await watched.scraper.poll()
        assert watched.scraper.fault is SourceFault.REFUSED


# --- addresses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_localhost_tries_both_families(host: str) -> None:
    """B30: an engine on one family only is polled under the name localhost."""
    engine = FakeEngine()
    async with (
        served(engine.metrics, engine.model_list, host) as port,
        Watched(f"http://localhost:{port}") as watched,
    ):
        await watched.scraper.poll()
        assert watched.scraper.fault is None


async def test_localhost_is_ipv4_where_both_answer() -> None:
    """B30: the poller takes the address that the proxy takes."""
    four, six = FakeEngine(), FakeEngine()
    async with (
        served(four.metrics, four.model_list, "127.0.0.1") as port,
        served(six.metrics, six.model_list, "::1", port=port),
        Watched(f"http://localhost:{port}") as watched,
    ):
        await watched.scraper.poll()
    assert (four.asked, six.asked) == (["metrics", "models"], [])


async def test_literal_address_in_brackets() -> None:
    engine = FakeEngine()
    async with (
        served(engine.metrics, engine.model_list, "::1") as port,
        Watched(f"http://[::1]:{port}") as watched,
    ):
        await watched.scraper.poll()
        assert watched.scraper.fault is None


async def test_localhost_where_nobody_listens_is_refused() -> None:
    async with Watched(f"http://localhost:{free_port()}") as watched:
        await watched.scraper.poll()
        assert watched.scraper.fault is SourceFault.REFUSED


# --- the loop -------------------------------------------------------------------------------------------


async def test_one_request_at_a_time_even_if_each_outlasts_the_interval() -> None:
    """C24: pages slower than the interval never overlap."""
    engine = FakeEngine(delay_s=0.02)
    async with (
        served(engine.metrics, engine.model_list) as port,
        Watched(url(port), interval_s=0.001) as watched,
    ):
        watched.scraper.start()
        watched.scraper.start()
        await until(lambda: watched.scraper.polls >= 6)
    assert engine.most_at_once == 1


async def test_close_ends_a_request_under_way_and_may_be_repeated() -> None:
    engine = FakeEngine(delay_s=60)
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port), timeout_s=60) as watched:
        watched.scraper.start()
        await until(lambda: engine.asked == ["metrics"])
        async with asyncio.timeout(PATIENCE_S):
            await watched.scraper.close()
            await watched.scraper.close()
    assert watched.events == []


async def test_defect_of_the_receiver_stops_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, calls = FakeEngine(), 0

    def broken(_event: object) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("broken receiver")

    async with served(engine.metrics, engine.model_list) as port:
        scraper = Scraper(VLLM(), Poller(url(port), timeout_s=PATIENCE_S), broken, interval_s=0.001)
        scraper.start()
        await until(lambda: calls >= 4)
        await scraper.close()
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_fault_has_one_line_when_it_begins_and_one_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(status=500)
    caplog.set_level(logging.INFO)
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        for status in (500, 500, 200, 200, 500, *[200] * 8):
            engine.status = status
            await watched.scraper.poll()
    begun, ended = [
        record.getMessage() for record in caplog.records if record.name == "kvctl.control.scraper"
    ]
    assert "http_status" in begun
    assert "is back" in ended
    assert "s; readings failed: 3 http_status" in ended


async def test_refused_polls_are_not_to_be_taken_for_refused_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    caplog.set_level(logging.INFO)
    async with served(engine.metrics, engine.model_list) as port:
        pass
    async with Watched(url(port)) as watched:
        for _ in range(2):
            await watched.scraper.poll()
        async with served(engine.metrics, engine.model_list, port=port):
            for _ in range(8):
                await watched.scraper.poll()
    (ended,) = [text for record in caplog.records if "is back" in (text := record.getMessage())]
    assert ended.endswith("s; readings failed: 2 connection refused")


async def test_credentials_of_the_url_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with Watched(f"http://user:hunter2@127.0.0.1:{free_port()}") as watched:
        await watched.scraper.poll()
    assert caplog.records
    assert "hunter2" not in caplog.text


async def test_page_of_another_engine_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """C22: an SGLang page is named, in one line."""
    engine = FakeEngine(text=(PAGES / "sglang-0.3.prom").read_text())
    async with served(engine.metrics, engine.model_list) as port, Watched(url(port)) as watched:
        for _ in range(3):
            await watched.scraper.poll()
        assert watched.scraper.failures == {SourceFault.NO_SERIES: 3}
    assert caplog.text.count("sglang") == 1
