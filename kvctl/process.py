"""The daemon as a process: made from its settings, run until a signal, closed with all that it needs."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import uvloop

from kvctl import logs
from kvctl.control.certificates import Trust
from kvctl.control.dialing import base_of, connector_to, trusting
from kvctl.core.gate import Gate
from kvctl.daemon import Daemon
from kvctl.gpu.base import GpuSource
from kvctl.gpu.nvml import make_source
from kvctl.gpu.worker import Isolation
from kvctl.part_configs import authorization, certificates_of, engine_settings
from kvctl.settings.errors import SettingsError
from kvctl.settings.model import Settings
from kvctl.settings.surroundings import warnings
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.foreign import Interpreter, http_post
from kvctl.tokens.load import load_counter
from kvctl.unit import MakeGate

log = logs.get("daemon")

SWITCH_S = 0.0005  # after this a thread that counts a long prompt gives the loop its turn
COLLECT_AFTER = (20_000, 20, 20)  # objects, and collections of a younger generation before one of the older
SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


async def serve(
    settings: Settings,
    *,
    stop: asyncio.Event,
    hurry: asyncio.Event | None = None,
    gpu_source: GpuSource | None = None,
    read: Callable[[], Settings] | None = None,
    gate: MakeGate = Gate,
) -> None:
    """Run until ``stop`` is set; ``hurry`` cuts the drain that follows short.

    ``gpu_source`` stands in for those that the settings name.

    ``read`` loads the settings again, at SIGHUP or when on-call asks for it. ``gate`` makes the gates.

    Raises ListenError, TokenizerError or CertificateError when the settings cannot be obeyed.
    """
    each, certificates = engine_settings(settings), certificates_of(settings)
    sources = {
        one.gpus: gpu_source
        or make_source(one.gpus, timeout_s=settings.gpu_timeout, isolation=Isolation(settings.nvml_isolation))
        for one in each.values()
    }
    async with AsyncExitStack() as stack:
        counters = {
            name: await stack.enter_async_context(_counter(one, certificates.trusts.get(name)))
            for name, one in each.items()
        }
        daemon = Daemon(settings, sources, counters, read, gate=gate, certificates=certificates)
        if hurry is not None:
            stack.push_async_callback(_cancelled, asyncio.create_task(_cut_short(hurry, daemon)))
        hang_ups = HangUps(daemon.reload)
        stack.push_async_callback(hang_ups.close)
        await stack.enter_async_context(daemon.running())
        stack.callback(signal.signal, signal.SIGHUP, _unheard)
        _hear(signal.SIGHUP, hang_ups.come)
        await stop.wait()


class HangUps:
    """SIGHUP: reload, with the outcome in the log alone. One that has not begun reads for all."""

    def __init__(self, reload: Callable[[], Awaitable[object]]) -> None:
        self._reload = reload
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def come(self) -> None:
        """One came; after the close none is heard."""
        if self._closed or len(self._tasks) > 1:
            return
        task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Listen no more, and leave no reload behind."""
        self._closed = True
        for task in (tasks := tuple(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._reload()
        except SettingsError:
            pass  # it is in the log
        except Exception:
            log.exception("a reload failed by a defect of kvctl; the old settings stay")


async def _cut_short(hurry: asyncio.Event, daemon: Daemon) -> None:
    """End the drain once ``hurry`` is set; nothing is cancelled: what is to be written still is."""
    await hurry.wait()
    logs.event(log, logging.WARNING, "cut", "a second signal cuts the drain short")
    daemon.proxy.hurry()


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel ``task`` and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _counter(settings: Settings, trust: Trust | None) -> AsyncIterator[ChainCounter]:
    key = authorization(settings)
    url = settings.engine_url
    async with aiohttp.ClientSession(connector=connector_to(url)) as session:
        counter = await asyncio.to_thread(
            load_counter,
            settings.tokenizer,
            ask=Interpreter(
                http_post(
                    session,
                    base_of(url),
                    headers=None if key is None else {"Authorization": key},
                    options=lambda: trusting(url, trust),
                )
            ),
            inline_bytes=settings.tokenize_inline_bytes,
            workers=settings.tokenize_workers,
            timeout_s=settings.tokenize_timeout,
            isolated=settings.tokenize_isolation == "process",
            media_tokens={
                "image": settings.image_tokens,
                "video": settings.video_tokens,
                "audio": settings.audio_tokens,
            },
        )
        try:
            yield counter
        finally:
            await counter.close()


def run(settings: Settings, read: Callable[[], Settings] | None = None) -> None:
    """Serve in the foreground until SIGTERM or SIGINT. A second signal cuts the drain short.

    ``read`` loads the settings again, for a reload.
    """
    prepare_interpreter()
    handler = logs.start(settings.log_level, settings.log_format)
    for sentence in warnings(settings):
        logs.event(log, logging.WARNING, "settings", sentence)
    signal.signal(signal.SIGHUP, _unheard)  # until there is somebody to reload for
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_until_signal(settings, read))
    finally:
        logs.stop(handler)
        # of one that comes between two handlers Python would tell
        told, sys.unraisablehook = sys.unraisablehook, _unheard
        for signum in SIGNALS:  # as the interpreter ends, all but this give way to the default
            signal.signal(signum, signal.SIG_IGN)
        sys.unraisablehook = told


def _hear(signum: signal.Signals, do: Callable[[], None]) -> None:
    """Have ``do`` called by the loop for each such signal.

    Not by the loop's own handlers: as it closes they give way to the default, which kills.
    """
    loop = asyncio.get_running_loop()

    def heard(*_: object) -> None:
        loop.call_soon_threadsafe(do)

    signal.signal(signum, heard)


def _unheard(*_: object) -> None:
    """For signals that come when nobody listens any more: neither kill nor count."""


def prepare_interpreter() -> None:
    """Switch threads often, collect garbage seldom: by default there is a collection every few requests.

    What is loaded by now stays for good, and is not searched again.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def _run_until_signal(settings: Settings, read: Callable[[], Settings] | None) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        _hear(signum, signalled)
    try:
        await serve(settings, stop=stop, hurry=hurry, read=read)
    finally:
        for signum in SIGNALS:  # the loop is closed next
            signal.signal(signum, _unheard)
