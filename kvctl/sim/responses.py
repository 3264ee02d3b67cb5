"""``/v1/responses`` of the simulated engine, with vLLM 0.32's store and its generation in the background.

As there, a response in the background is told as ``queued`` until it is over, and one that fails stays so for
ever; ``sim_fails_after: k`` in a body makes it fail after k tokens. Whoever streams one that failed waits for
ever too.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvctl.sim import text
from kvctl.sim.engine import SimulatedEngine
from kvctl.sim.requests import Reader, RefusedError, check_model, integer, parse_json
from kvctl.sim.running import Run
from kvctl.sim.scheduler import Finish

Document = dict[str, Any]

_SAMPLING = ("model", "ignore_eos", "min_tokens", "logit_bias", "sim_output_tokens", "cache_salt", "tools")
_NO_STORE = (
    "This engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, start it with --keep-responses."
)


class _FailedError(Exception):
    """What ``sim_fails_after`` brings about."""


@dataclass(eq=False)
class _Kept:
    """One stored response; ``events`` of its stream where it has one."""

    document: Document
    messages: list[Document]
    events: list[Document] | None = None
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None

    async def add(self, event: Document) -> None:
        """One more event for whoever streams it."""
        if self.events is not None:
            async with self.news:
                self.events.append(event)
                self.news.notify_all()

    async def stream(self, after: int) -> AsyncIterator[Document]:
        """The events behind number ``after``, to the last one."""
        events, at = [] if self.events is None else self.events, after + 1
        while True:
            async with self.news:
                while at >= len(events):
                    await self.news.wait()
            yield events[at]
            if events[at]["type"] == "response.completed":
                return
            at += 1


class Responses:
    """The routes. ``keeps``: whether responses are stored; without, none is generated in the background."""

    def __init__(
        self,
        engine: SimulatedEngine,
        reader: Reader,
        take_serial: Callable[[], int],
        model: str,
        *,
        keeps: bool,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._take_serial = take_serial
        self._model = model
        self._keeps = keeps
        self.kept: dict[str, _Kept] = {}

    def add_to(self, app: web.Application) -> None:
        """Serve the routes."""
        app.router.add_post("/v1/responses", self._create)
        app.router.add_get("/v1/responses/{name}", self._retrieve)
        app.router.add_post("/v1/responses/{name}/cancel", self._cancel)

    async def close(self) -> None:
        """End what is generated in the background; a process that ends forgets everything."""
        tasks = [kept.task for kept in self.kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.kept.clear()

    # --- the routes ---------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await request.read())
        check_model(body, self._model)
        background, stream = bool(body.get("background")), bool(body.get("stream"))
        if background and not self._keeps:
            raise RefusedError(400, _NO_STORE, "invalid_request_error", "background")
        messages = self._conversation(body)
        run = Run(self._engine, self._reader.read(_as_chat(body, messages), chat=True), self._take_serial())
        kept = _Kept(self._begun(body, run), messages, events=[] if stream else None)
        if not background:
            return await self._in_course(request, kept, run, keeps=bool(body.get("store", True)))
        self.kept[kept.document["id"]] = kept
        queued = dict(kept.document)
        kept.task = asyncio.create_task(self._generate(kept, run, integer(body, "sim_fails_after")))
        return await _streamed(request, kept, -1) if stream else web.json_response(queued)

    async def _in_course(
        self, request: web.Request, kept: _Kept, run: Run, *, keeps: bool
    ) -> web.StreamResponse:
        """A response that its request waits for; a client that leaves aborts it."""
        kept.task = asyncio.create_task(self._generate(kept, run, None))
        try:
            answer = await _streamed(request, kept, -1) if kept.events is not None else None
            await kept.task
        finally:
            kept.task.cancel()
            run.abort()
        if keeps and self._keeps:
            self.kept[kept.document["id"]] = kept
        return answer or web.json_response(kept.document)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        kept = self._named(request)
        if request.query.get("stream") not in ("true", "1"):
            return web.json_response(kept.document)
        if kept.events is None:
            message = f"Unknown response_id: {kept.document['id']}"
            raise RefusedError(400, message, "BadRequestError", "response_id")
        return await _streamed(request, kept, int(request.query.get("starting_after", "-1")))

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        kept = self._named(request)
        if kept.document["status"] not in ("queued", "in_progress"):
            message = "Cannot cancel a synchronous response."
            raise RefusedError(400, message, "invalid_request_error", "response_id")
        kept.document["status"] = "cancelled"
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.gather(kept.task, return_exceptions=True)
        return web.json_response(kept.document)

    def _named(self, request: web.Request) -> _Kept:
        name = request.match_info["name"]
        if name not in self.kept:
            message = f"Response with id '{name}' not found."
            raise RefusedError(404, message, "invalid_request_error", "response_id")
        return self.kept[name]

    # --- generation ---------------------------------------------------------------------------------

    async def _generate(self, kept: _Kept, run: Run, fails_after: int | None) -> None:
        """Run it to its end. One that fails leaves everything as it was, as if it were still waiting."""
        events = _Events(kept)
        with contextlib.suppress(_FailedError):
            try:
                run.submit()
                await events.opened()
                finish = Finish.STOP
                while batch := await run.next():
                    for _, position, ended in batch:
                        await events.token(position)
                        finish = ended or finish
                        if fails_after is not None and position + 1 >= fails_after:
                            raise _FailedError
                kept.document |= _ended(run, finish)
                kept.messages.append({"role": "assistant", "content": _text_of(run)})
                await events.closed()
            finally:
                run.abort()

    def _conversation(self, body: Mapping[str, Any]) -> list[Document]:
        """What the engine makes of the body, with the conversation that it goes on from."""
        name = body.get("previous_response_id")
        if name is not None and name not in self.kept:
            message = f"Response with id '{name}' not found."
            raise RefusedError(404, message, "invalid_request_error", "response_id")
        # As in vLLM, the instructions of one response do not hold for the next.
        before = [m for m in self.kept[name].messages if m["role"] != "system"] if name is not None else []
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        return [*system, *before, *_messages(body.get("input"))]

    def _begun(self, body: Mapping[str, Any], run: Run) -> Document:
        return {
            "id": str(body.get("request_id") or f"resp_{uuid.uuid4().hex}"),
            "created_at": int(time.time()),
            "object": "response",
            "model": self._model,
            "instructions": body.get("instructions"),
            "output": [],
            "background": bool(body.get("background")),
            "max_output_tokens": run.generation.max_outputs[0],
            "previous_response_id": body.get("previous_response_id"),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "status": "queued",
            "usage": None,
        }


class _Events:
    """Writes the events of a response, numbered."""

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._place = {"item_id": f"msg_{uuid.uuid4().hex}", "output_index": 0, "content_index": 0}
        self._number = 0

    async def opened(self) -> None:
        """Before the first token."""
        begun = self._kept.document | {"status": "in_progress"}
        await self._add("response.created", response=begun)
        await self._add("response.in_progress", response=begun)

    async def token(self, position: int) -> None:
        """One token."""
        await self._add("response.output_text.delta", **self._place, delta=text.word(position))

    async def closed(self) -> None:
        """Behind the last token."""
        await self._add("response.completed", response=self._kept.document)

    async def _add(self, kind: str, **more: Any) -> None:
        await self._kept.add({"type": kind, "sequence_number": self._number, **more})
        self._number += 1


async def _streamed(request: web.Request, kept: _Kept, after: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async for event in kept.stream(after):
        line = json.dumps(event, separators=(",", ":"))
        await response.write(f"event: {event['type']}\ndata: {line}\n\n".encode())
    await response.write_eof()
    return response


def _text_of(run: Run) -> str:
    return "".join(map(text.word, range(run.output_tokens)))


def _ended(run: Run, finish: Finish) -> Document:
    """What an answer adds to the response."""
    part = {"type": "output_text", "text": _text_of(run), "annotations": []}
    name = f"msg_{uuid.uuid4().hex}"
    item = {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": [part]}
    prompt, output = run.prompt_tokens, run.output_tokens
    return {
        "output": [item],
        "status": "incomplete" if finish is Finish.LENGTH else "completed",
        "usage": {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output},
    }


def _as_chat(body: Mapping[str, Any], messages: list[Document]) -> Document:
    output = integer(body, "max_output_tokens")
    if output is not None and output < 1:
        message = f"max_tokens must be at least 1, got {output}. (parameter=max_tokens, value={output})"
        raise RefusedError(400, message, "BadRequestError", "max_tokens")
    sampling = {key: body[key] for key in _SAMPLING if key in body}
    return {**sampling, "messages": messages, "max_tokens": output}


def _messages(given: Any) -> list[Document]:
    """Text, or messages of text. Raises RefusedError on anything else."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if (
        not isinstance(items, list)
        or not all(isinstance(i, dict) and "role" in i for i in items)
        or not items
    ):
        raise RefusedError(400, "input must be text or messages of text", "BadRequestError", "input")
    return [{"role": item["role"], "content": _content(item.get("content"))} for item in items]


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": str(part.get("text", ""))} for part in content]
