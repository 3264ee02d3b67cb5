"""The simulated engine as an HTTP server with vLLM's OpenAI API, and ``/generate`` with lengths alone.

A client that leaves aborts its request, streaming or not, and what it held is free again. Faults for
tests: ``engine.pause`` (wedged: /health and /metrics answer, no token moves), ``engine.sleep``, ``die``
(every connection is reset, nothing listens any more).
"""

import uuid
from typing import Any

from aiohttp import web

from kvctl import __version__
from kvctl.sim import page, text
from kvctl.sim.answers import Answer
from kvctl.sim.engine import SimulatedEngine
from kvctl.sim.requests import Generation, Reader, RefusedError, check_model, parse_json
from kvctl.sim.responses import Responses
from kvctl.sim.running import Run
from kvctl.sim.scheduler import EngineConfig, Finish

MAX_BODY_BYTES = 256 * 1024 * 1024


class SimServer:
    """An engine behind HTTP. ``await start()``, then ``url``; ``await close()`` at the end."""

    def __init__(
        self, config: EngineConfig, *, model: str = "sim", seed: int = 1, keeps_responses: bool = False
    ) -> None:
        self.engine = SimulatedEngine(config)
        self.model = model
        self.port = 0
        self._host = ""
        self._reader = Reader(config, model, seed)
        self._serial = 0
        self.responses = Responses(self.engine, self._reader, self._take_serial, model, keeps=keeps_responses)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where the engine answers."""
        return f"http://{self._host}:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen and begin stepping. Port 0: any free one. Raises OSError if the address is taken."""
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, host, port)
        await site.start()
        self._host, self.port = host, runner.addresses[0][1]
        self.engine.start()

    async def close(self) -> None:
        """Stop stepping and listening; open connections are closed."""
        await self.responses.close()
        await self.engine.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def die(self) -> None:
        """As a killed process: all connections break at once, nothing listens."""
        server = self._runner.server if self._runner is not None else None
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        await self.close()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals])
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/generate", self._plain)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self.responses.add_to(app)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": f"sim-{__version__}"})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            text=page.render(self.engine, self.model), content_type="text/plain", charset="utf-8"
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": int(self.engine.started_at),
            "owned_by": "kvctl-sim",
            "root": self.model,
            "parent": None,
            "max_model_len": self.engine.config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse_json(await request.read())
        check_model(body, self.model)
        if "messages" in body:
            tokens = text.render_chat(body)
        else:
            tokens = [text.BOS] if body.get("add_special_tokens", True) else []
            tokens += text.encode(str(body.get("prompt", "")))
        limit = self.engine.config.max_model_len
        return web.json_response(
            {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse_json(await request.read())
        check_model(body, self.model)
        try:
            return web.json_response(
                {"prompt": text.decode([int(token) for token in body.get("tokens", [])])}
            )
        except (TypeError, ValueError) as error:
            raise RefusedError(400, str(error), "BadRequestError", "tokens") from None

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.read_lengths(parse_json(await request.read())))

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        return await self._answer(request, self._reader.read(parse_json(await request.read()), chat=chat))

    async def _answer(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        run = Run(self.engine, generation, self._take_serial())
        named = request.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
        answer = Answer(chat=generation.chat, model=self.model, request_id=named)
        try:
            run.submit()
            if generation.stream:
                return await _stream(request, run, answer)
            return web.json_response(await _whole(run, answer))
        finally:
            run.abort()

    def _take_serial(self) -> int:
        self._serial += 1
        return self._serial


async def _stream(request: web.Request, run: Run, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    while batch := await run.next():
        await response.write(b"".join(_event(run, answer, *one) for one in batch))
    generation = run.generation
    await response.write(
        answer.closing(run.prompt_tokens, run.output_tokens, with_usage=generation.include_usage)
    )
    await response.write_eof()
    return response


def _event(run: Run, answer: Answer, index: int, position: int, finish: Finish | None) -> bytes:
    if run.generation.scoring:
        return b""
    event = answer.token(index, position, finish)
    return event if position else answer.opening(index) + event


async def _whole(run: Run, answer: Answer) -> dict[str, Any]:
    finishes: dict[int, Finish] = {}
    while batch := await run.next():
        finishes |= {index: finish for index, _, finish in batch if finish is not None}
    outputs = [
        (0 if run.generation.scoring else sequence.output, finishes[index])
        for index, sequence in enumerate(run.sequences)
    ]
    return answer.whole(outputs, run.prompt_tokens)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except RefusedError as refused:
        return web.json_response(refused.body, status=refused.status)
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    return response
