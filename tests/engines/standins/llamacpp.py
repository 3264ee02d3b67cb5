"""llama.cpp's server of 2026: slots, its own completion route, its errors, its page of totals at the end."""

import json
from typing import Any

from aiohttp import web

from tests.engines.standins import openai
from tests.engines.standins.core import Run, Standin, event_stream, read, words


class LlamaCppStandin(Standin):
    """Word-counting llama.cpp with split slots. While ``loading``, everything is 503."""

    name = "llamacpp"

    def __init__(self, *, loading: bool = False, **limits: int) -> None:
        super().__init__(**limits)
        self.loading = loading

    def routes(self, app: web.Application) -> None:
        app.middlewares.append(self._loading)
        for path in ("/completion", "/completions"):
            app.router.add_post(path, self._completion)
        app.router.add_post("/infill", self._completion)
        for path in ("/v1/chat/completions", "/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._openai)
        for path in ("/embedding", "/v1/embeddings"):
            app.router.add_post(path, self._embed)
        app.router.add_get("/health", self._health)
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)

    @web.middleware
    async def _loading(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.loading:
            return _error(503, "Loading model", "unavailable_error")
        answer: web.StreamResponse = await handler(request)
        return answer

    def fits(self, run: Run) -> bool:  # noqa: ARG002 - a slot is all it needs
        return len(self.running) < self.slots

    # --- pages --------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _props(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "default_generation_settings": {"n_ctx": self.context},
                "total_slots": self.slots,
                "model_alias": "m",
                "build_info": "b11549-2026",
                "is_sleeping": False,
            }
        )

    async def _slots(self, _request: web.Request) -> web.Response:
        busy = [index < len(self.running) for index in range(self.slots)]
        return web.json_response(
            [{"id": index, "n_ctx": self.context, "is_processing": on} for index, on in enumerate(busy)]
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx": self.context}}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        rows = {
            "prompt_tokens_total": self.prompt_total,
            "tokens_predicted_total": self.output_total,
            "n_decode_total": self.steps,
            "requests_processing": len(self.running),
            "requests_deferred": len(self.waiting),
        }
        text = "\n".join(f"llamacpp:{name} {value:g}" for name, value in rows.items())
        return web.Response(text=text + "\n")

    # --- generation ---------------------------------------------------------------------------------

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        given = body.get("prompt", body.get("input_prefix", ""))
        if not isinstance(given, str | list):
            return _error(
                400, '"prompt" elements must be a string, a list of tokens', "invalid_request_error"
            )
        prompt = words(given) if isinstance(given, str) else len(given)
        if prompt >= self.context:
            return self._too_long(prompt)
        most = self._most(prompt, body.get("n_predict", -1))
        if not body.get("stream"):
            run = await self.whole(prompt, most)
            return web.json_response(_last("w " * run.made, prompt, run.made))
        response = await event_stream(request)
        made = 0
        async for number, _ in self.each(prompt, most):
            made = number
            event = {"index": 0, "content": "w", "tokens": [number], "stop": False, "id_slot": -1}
            event |= {"tokens_predicted": number, "tokens_evaluated": prompt}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(f"data: {json.dumps(_last('', prompt, made))}\n\n".encode())
        return response

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        prompt = openai.prompt_of(body)
        if prompt >= self.context:
            return self._too_long(prompt)
        return await openai.answer(
            self, request, body, prompt, self._most(prompt, body.get("max_tokens", -1))
        )

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        await read(request, self.bodies)
        return _error(
            501,
            "This server does not support embeddings. Start it with `--embeddings`",
            "not_supported_error",
        )

    def _most(self, prompt: int, asked: int) -> int:
        room = self.context - prompt - 1
        return room if asked < 0 else min(asked, room)

    def _too_long(self, prompt: int) -> web.Response:
        message = f"request ({prompt} tokens) exceeds the available context size ({self.context} tokens)"
        more = {"n_prompt_tokens": prompt, "n_ctx": self.context}
        return _error(400, f"{message}, try increasing it", "exceed_context_size_error", **more)


def _last(content: str, prompt: int, made: int) -> dict[str, Any]:
    return {
        "index": 0,
        "content": content,
        "stop": True,
        "model": "m",
        "tokens_predicted": made,
        "tokens_evaluated": prompt,
        "stop_type": "limit",
        "truncated": False,
    }


def _error(status: int, message: str, kind: str, **more: int) -> web.Response:
    error = {"code": status, "message": message, "type": kind, **more}
    return web.json_response({"error": error}, status=status)
