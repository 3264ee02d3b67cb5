"""TGI 3.3: its routes, its refusals, its page; requests join the batch by what they reserve."""

import json
from typing import Any

from aiohttp import web

from tests.engines.standins import openai
from tests.engines.standins.core import Run, Standin, event_stream, read, words

AHEAD = 1024


class TgiStandin(Standin):
    """Token-true, word-counting TGI."""

    name = "tgi"
    version = "3.3.4"
    most_requests = 128

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/", self._compat)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/generate_stream", self._stream)
        app.router.add_post("/v1/chat/completions", self._openai)
        app.router.add_post("/v1/completions", self._openai)
        app.router.add_get("/health", self._health)
        app.router.add_get("/info", self._info)
        app.router.add_get("/metrics", self._metrics)

    @property
    def reserved(self) -> int:
        """What the batch holds back, which is more than it holds."""
        return sum(run.prompt + run.made + min(run.most - run.made, AHEAD) for run in self.running)

    def fits(self, run: Run) -> bool:
        return self.reserved + run.prompt + min(run.most, AHEAD) <= self.capacity

    # --- pages --------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_id": "org/m",
                "max_concurrent_requests": self.most_requests,
                "max_input_tokens": self.context - 1,
                "max_total_tokens": self.context,
                "max_client_batch_size": 4,
                "router": "text-generation-router",
                "version": self.version,
            }
        )

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = [f"tgi_batch_max_total_tokens {self.capacity}", f"tgi_queue_size {len(self.waiting)}"]
        if self.steps:  # series appear with their first value
            lines += [
                f"tgi_batch_current_size {len(self.running)}",
                f"tgi_batch_current_max_tokens {self.reserved}",
                f'tgi_batch_inference_count{{method="decode"}} {self.steps}',
                f"tgi_request_input_length_sum {self.prompt_total}",
                f"tgi_request_generated_tokens_sum {self.output_total}",
                f'tgi_request_generated_tokens_bucket{{le="+Inf"}} {len(self.finished)}',
            ]
        return web.Response(text="\n".join(lines) + "\n")

    # --- generation ---------------------------------------------------------------------------------

    async def _compat(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        return await self._answer(request, body, streamed=bool(body.get("stream")), in_list=True)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await read(request, self.bodies), streamed=False)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await read(request, self.bodies), streamed=True)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], *, streamed: bool, in_list: bool = False
    ) -> web.StreamResponse:
        params = body.get("parameters") or {}
        prompt, most = words(body["inputs"]), params.get("max_new_tokens", 100)
        if (refused := self._refuse(prompt, most)) is not None:
            return refused
        if not streamed:
            run = await self.whole(prompt, most)
            whole: dict[str, Any] = {"generated_text": "w " * run.made}
            if params.get("details"):
                whole["details"] = _details(run.made)
            return web.json_response([whole] if in_list else whole)
        response = await event_stream(request)
        async for number, last in self.each(prompt, most):
            event = {
                "index": number,
                "token": {"id": number, "text": "w", "logprob": -0.1, "special": False},
                "generated_text": "w " * number if last else None,
                "details": _details(number) if last else None,
            }
            await response.write(f"data:{json.dumps(event)}\n\n".encode())
        return response

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        prompt = openai.prompt_of(body)
        most = body.get("max_tokens") or (100 if "prompt" in body else self.context - prompt)
        if (refused := self._refuse(prompt, most)) is not None:
            return refused
        return await openai.answer(self, request, body, prompt, most)

    def _refuse(self, prompt: int, most: int) -> web.Response | None:
        if len(self.running) + len(self.waiting) >= self.most_requests:
            return web.json_response({"error": "Model is overloaded", "error_type": "overloaded"}, status=429)
        if prompt + most <= self.context:
            return None
        told = (
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= "
            f"{self.context}. Given: {prompt} `inputs` tokens and {most} `max_new_tokens`"
        )
        return web.json_response({"error": told, "error_type": "validation"}, status=422)


def _details(tokens: int) -> dict[str, Any]:
    return {"finish_reason": "length", "generated_tokens": tokens, "seed": None, "prefill": [], "tokens": []}
