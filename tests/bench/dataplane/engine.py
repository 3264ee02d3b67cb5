"""An engine that costs next to nothing: what a proxy adds is then what is measured.

``python -m tests.bench.dataplane.engine --port P`` answers /v1/models, /metrics, /health and /version, and
every POST with a plain JSON answer, or with an event stream where the body asks for one: ``max_tokens``
events, ``gap=N`` milliseconds apart (anywhere in the body).

All streams beat together, as an engine's steps do.
"""

import argparse
import asyncio
import json
import re
from typing import cast

import uvloop

MODEL = "bench"
CONTEXT = 262_144
BLOCKS, BLOCK = 1 << 20, 16

_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_GAP = re.compile(rb"gap=(\d+)")
_LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)

USAGE = {"completion_tokens": 8}  # prompts are not counted here, and a wrong number would be found out
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "eight tokens of text"}, "text": "eight"}
ANSWER = json.dumps(
    {
        "id": "bench-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [_CHOICE | {"finish_reason": "stop"}],
        "usage": USAGE,
    }
).encode()
_DELTA = {"index": 0, "delta": {"content": " tok"}, "finish_reason": None}
_CHUNK = {"id": "bench-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
EVENT = b"data: %b\n\n" % json.dumps(_CHUNK | {"choices": [_DELTA]}).encode()
LAST = b"data: %b\n\n" % json.dumps(_CHUNK | {"choices": [_DELTA | {"finish_reason": "stop"}]}).encode()
DONE = b"data: [DONE]\n\n"

METRICS = f"""\
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{MODEL}"}} 0.0
vllm:num_preemptions_total{{engine="0",model_name="{MODEL}"}} 0.0
vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} %d
vllm:cache_config_info{{engine="0",block_size="{BLOCK}",num_gpu_blocks="{BLOCKS}",\
kv_cache_size_tokens="{BLOCK * BLOCKS}"%s}} 1.0
"""
PREFIX_CACHING = ',enable_prefix_caching="True"'
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": CONTEXT}]})


def plain(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    return head + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_WHOLE, _EVENT, _END = plain(ANSWER), chunk(EVENT), chunk(LAST) + chunk(DONE) + b"0\r\n\r\n"


class Beats:
    """All streams of one gap beat at the same moments."""

    def __init__(self, *, prefix_caching: bool) -> None:
        self._streams: dict[int, dict[Connection, int]] = {}
        self._caching = PREFIX_CACHING if prefix_caching else ""
        self._tasks: list[asyncio.Task[None]] = []
        self.made = 0

    def join(self, connection: "Connection", events: int, gap_ms: int) -> None:
        if gap_ms not in self._streams:
            self._streams[gap_ms] = {}
            self._tasks.append(asyncio.get_running_loop().create_task(self._beat(gap_ms)))
        self._streams[gap_ms][connection] = events

    def metrics(self) -> bytes:
        return plain((METRICS % (self.made, self._caching)).encode(), b"text/plain")

    def leave(self, connection: "Connection") -> None:
        for streams in self._streams.values():
            streams.pop(connection, None)

    async def _beat(self, gap_ms: int) -> None:
        streams, clock = self._streams[gap_ms], asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + gap_ms / 1000, clock() - 1.0)
            await asyncio.sleep(due - clock())
            for connection, left in list(streams.items()):
                self.made += 1
                connection.write(_EVENT if left > 1 else _END)
                if left > 1:
                    streams[connection] = left - 1
                else:
                    del streams[connection]


class Connection(asyncio.Protocol):
    """One connection, kept alive; no pipelining."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._got = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._beats.leave(self)
        self._transport = None

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._got += data
        border = self._got.find(b"\r\n\r\n")
        if border < 0:
            return
        head = bytes(self._got[: border + 2])
        chunked = b"chunked" in head.lower()
        length = _LENGTH.search(head)
        end = border + 4 + (int(length[1]) if length else 0)
        if chunked:
            last = self._got.find(b"0\r\n\r\n", border + 4)
            if last < 0:
                return
            end = last + 5
        if len(self._got) < end:
            return
        body = bytes(self._got[border + 4 : end])
        del self._got[:end]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /metrics"):
            self.write(self._beats.metrics())
        elif head.startswith(b"GET "):
            self.write(plain(MODELS.encode()))
        elif b'"stream": true' in body or b'"stream":true' in body:
            tokens, gap = _TOKENS.search(body), _GAP.search(body)
            self.write(_STREAM_HEAD)
            self._beats.join(self, int(tokens[1]) if tokens else 16, int(gap[1]) if gap else 10)
        else:
            self.write(_WHOLE)


async def serve(port: int, *, prefix_caching: bool) -> None:
    beats = Beats(prefix_caching=prefix_caching)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(beats), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--prefix-caching", action="store_true", help="say that common prefixes are kept once"
    )
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.port, prefix_caching=options.prefix_caching))
