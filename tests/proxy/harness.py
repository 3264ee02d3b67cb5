"""A misbehaving engine and a whole proxy on loopback sockets, with the real gate between."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any

from kvctl.control.gatekeeper import Gatekeeper
from kvctl.core.events import Command, DrainChanged, EngineDescribed, LeaseEnded
from kvctl.core.gate import Gate
from kvctl.core.outcomes import ChoiceReason, EndReason, Policy, ProxyFault
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo
from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.proxy.pool import Upstream
from kvctl.proxy.seams import Backend, Lane, ProxyConfig, Served
from kvctl.proxy.server import Proxy
from kvctl.tokens.base import Count, CountMethod

PATIENCE = 60.0  # seconds before a test that waits is a failed test
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":8}'
CHAT_STREAM = CHAT[:-1] + b',"stream":true}'


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - tests look at what has no event
            await asyncio.sleep(0.002)


async def turns() -> None:
    """Let the loop go round until whatever is in the kernel has been read: a reset throws away the rest.

    After a pause alone it may not have been: one loop looks at its timers before its sockets.
    """
    for _ in range(4):
        await asyncio.sleep(0)


def event(text: str, finish: str | None = None) -> bytes:
    """One chunk of a chat stream, as vLLM writes it."""
    reason = "null" if finish is None else f'"{finish}"'
    return (
        f'data: {{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{{"index":0,'
        f'"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":{reason}}}]}}\n\n'
    ).encode()


USAGE_EVENT = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[],'
    b'"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = event("a") + event("b") + event("", "stop") + USAGE_EVENT + DONE
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
PLAIN = (
    b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3}}'
)


def chunk(data: bytes) -> bytes:
    """In chunked framing."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"


def plain(body: bytes, status: str = "200 OK", *lines: bytes) -> bytes:
    """A whole answer with a length."""
    head = [f"HTTP/1.1 {status}".encode(), b"content-type: application/json", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


# --- the engine's side ------------------------------------------------------------------------------


@dataclass
class Request:
    """A request as the engine got it, byte for byte."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Wire:
    """One connection as a script sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> Request:
        head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        pairs = [line.split(b": ", 1) for line in head[1:]]
        headers = [(name, value) for name, value in pairs]
        lengths = [int(value) for name, value in headers if name.lower() == b"content-length"]
        body = await self.reader.readexactly(lengths[0]) if lengths else b""
        return Request(head[0], headers, body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_split(self, data: bytes, size: int = 1) -> None:
        """In pieces that travel apart."""
        for start in range(0, len(data), size):
            await self.send(data[start : start + size])
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Return when the peer closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        if self.writer.is_closing() or sock is None or sock.fileno() < 0:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


Script = Callable[[Wire], Awaitable[None]]


class FakeEngine:
    """Runs ``script`` for every connection; counts them, and those that are open."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.accepted = 0
        self.open = 0
        self.requests: list[Request] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str = "127.0.0.1", **options: Any) -> None:
        self._server = await asyncio.start_server(self._serve, host, self.port, limit=1 << 26, **options)
        self.port = self._server.sockets[0].getsockname()[1]

    async def start_unix(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("no task")
        self._tasks.add(task)
        self.accepted += 1
        self.open += 1
        try:
            await self.script(Wire(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()


def answering(*answers: bytes) -> Script:
    """Each request of a connection gets the next answer (the last one again and again)."""

    async def script(wire: Wire) -> None:
        for number in range(1_000_000):
            await wire.request()
            await wire.send(answers[min(number, len(answers) - 1)])

    return script


# --- the proxy's side -------------------------------------------------------------------------------


class WordCounter:
    """Counts words: a tokenizer that a test can follow."""

    async def count_text(
        self, model: str, prompts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Count:
        del model, add_special_tokens
        return Count(prompts=tuple(len(p.split()) for p in prompts), method=CountMethod.LOCAL)

    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        del model, body_bytes
        words = sum(len(str(message.get("content", "")).split()) for message in body["messages"])
        return Count(prompts=(words,), method=CountMethod.LOCAL)


@dataclass
class Recorder:
    """What the proxy reported."""

    records: list[Served] = field(default_factory=list)
    faults: list[ProxyFault] = field(default_factory=list)
    methods: list[CountMethod] = field(default_factory=list)
    admissions: int = 0
    choices: list[tuple[str, ChoiceReason]] = field(default_factory=list)

    def served(self, record: Served) -> None:
        self.records.append(record)

    def counted(self, method: CountMethod, seconds: float) -> None:
        del seconds
        self.methods.append(method)

    def decided(self, seconds: float) -> None:
        del seconds
        self.admissions += 1

    def fault(self, word: ProxyFault) -> None:
        self.faults.append(word)

    def chosen(self, engine: str, reason: ChoiceReason) -> None:
        self.choices.append((engine, reason))


@dataclass
class Rig:
    """A fake engine, the gate, and a proxy between a test and them."""

    engine: FakeEngine
    upstream: Upstream
    gate: Gate
    keeper: Gatekeeper
    proxy: Proxy
    seen: Recorder
    ended: list[LeaseEnded]
    port: int

    @property
    def reasons(self) -> list[EndReason]:
        return [command.record.reason for command in self.ended]

    async def client(self) -> Wire:
        return Wire(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))

    async def talk(self, data: bytes) -> bytes:
        """Send, and read until the proxy closes. Raises ConnectionError where it resets."""
        wire = await self.client()
        try:
            await wire.send(data)
            async with asyncio.timeout(PATIENCE):
                return await wire.reader.read()
        finally:
            wire.close()

    async def answer(self, data: bytes) -> bytes:
        """Send, and read one answer that has a length; does not wait for the connection to close."""
        wire = await self.client()
        try:
            await wire.send(data)
            async with asyncio.timeout(PATIENCE):
                head = await wire.reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                return head + await wire.reader.readexactly(length)
        finally:
            wire.close()

    async def post(self, body: bytes = CHAT, path: str = "/v1/chat/completions", *lines: bytes) -> bytes:
        """A POST on a connection of its own; the whole raw answer."""
        return await self.talk(post(body, path, b"connection: close", *lines))

    async def quiet(self) -> None:
        """Return when nothing is in course any more; the ledger must be zero then."""
        await eventually(lambda: not (self.upstream.busy or self.proxy.in_flight or self.proxy.body_bytes))
        assert len(self.gate.ledger) == 0
        assert self.gate.ledger.claimed_tokens == 0


def post(body: bytes = CHAT, path: str = "/v1/chat/completions", *lines: bytes) -> bytes:
    """A raw POST."""
    head = [
        f"POST {path} HTTP/1.1".encode(),
        b"Host: public.example",
        b"Content-Type: application/json",
        *lines,
    ]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body])


def get(path: str, *lines: bytes, method: str = "GET") -> bytes:
    """A raw GET that asks for the connection to be closed."""
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: public.example", b"Connection: close", *lines]
    return b"\r\n".join([*head, b"", b""])


def _keeper(gate: Gate, ended: list[LeaseEnded], context: int) -> Gatekeeper:
    """Of an engine with model ``m``; puts each end of a lease into ``ended``."""

    def observe(command: Command) -> None:
        if isinstance(command, LeaseEnded):
            ended.append(command)

    keeper = Gatekeeper(gate, asyncio.get_running_loop().time, [observe])
    keeper.handle(EngineDescribed(EngineInfo(models=("m",), context_tokens=context)))
    return keeper


@contextlib.asynccontextmanager
async def rig(
    script: Script,
    *,
    config: ProxyConfig | None = None,
    capacity: int = 100_000,
    url: str = "http://127.0.0.1:{port}",
    ready: Callable[[], tuple[bool, str]] = lambda: (True, "up"),
    ssl: SSLContext | None = None,
    policy: Policy = Policy.FORECAST,
    reader: Reader | None = None,
    context: int = 8192,
    drains: bool = False,
    **upstream_options: Any,
) -> AsyncIterator[Rig]:
    """The whole thing, started; stopped and checked for a zero ledger at the end."""
    engine = FakeEngine(script)
    await engine.start()
    gate = Gate(GateConfig(capacity_tokens=capacity, capacity_force=True, policy=policy))
    ended: list[LeaseEnded] = []
    keeper = _keeper(gate, ended, context)
    seen, adapter = Recorder(), VLLM()
    upstream = Upstream(
        url.format(port=engine.port),
        on_retry=lambda: seen.fault(ProxyFault.UPSTREAM_RETRIED),
        **upstream_options,
    )
    proxy = Proxy(
        backends=[
            Backend(
                upstream, adapter, reader or Reader(WordCounter(), adapter), [Lane(keeper)], drains=drains
            )
        ],
        config=config or ProxyConfig(),
        metrics=seen,
        ready=ready,
        clock=asyncio.get_running_loop().time,
        ssl=ssl,
    )
    await proxy.start("127.0.0.1:0")
    built = Rig(engine, upstream, gate, keeper, proxy, seen, ended, proxy.addresses[0][1])
    try:
        yield built
        await built.quiet()
    finally:
        keeper.handle(DrainChanged(draining=True))
        await proxy.close()
        await engine.stop()
