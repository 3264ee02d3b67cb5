"""SGLang 0.5: its routes, its refusals in the answer and in the stream, its page where it is on."""

import json
from typing import Any

from aiohttp import web

from tests.engines.standins import openai
from tests.engines.standins.core import Standin, event_stream, read, words

EVERY = 10  # steps between two looks at the gauges


class SglangStandin(Standin):
    """Word-counting SGLang. ``metrics`` False: as it starts without --enable-metrics."""

    name = "sglang"

    def __init__(self, *, metrics: bool = True, most_queued: int = 100, **limits: int) -> None:
        super().__init__(**limits)
        self._has_metrics = metrics
        self._most_queued = most_queued
        self._gauges = (0, 0, 0, 0)
        self._looked_at = -EVERY

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._openai)
        app.router.add_post("/v1/completions", self._openai)
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/v1/models", self._models)
        if self._has_metrics:
            app.router.add_get("/metrics", self._metrics)

    # --- pages --------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, _request: web.Request) -> web.Response:
        state = {"effective_max_running_requests_per_dp": self.slots}
        return web.json_response(
            {
                "model_path": "/models/m",
                "served_model_name": "m",
                "tp_size": 1,
                "dp_size": 1,
                "page_size": 1,
                "context_length": None,
                "max_total_num_tokens": self.capacity,
                "internal_states": [state],
                "version": "0.5.4",
            }
        )

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "sglang", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.steps - self._looked_at >= EVERY:
            decoded = self.output_total + sum(run.made for run in self.running)
            self._looked_at = self.steps
            self._gauges = (len(self.running), len(self.waiting), self.used, decoded)
        running, waiting, used, decoded = self._gauges
        whole = 'is_streaming="true",model_name="m"'
        labels = 'engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"'
        rows = {
            "num_running_reqs": running,
            "num_queue_reqs": waiting,
            "num_used_tokens": used,
            "token_usage": round(min(used / self.capacity, 1.0), 2),
            "max_total_num_tokens": self.capacity,
            "num_retracted_requests_total": 0,
        }
        lines = [f"sglang:{name}{{{labels}}} {float(value)}" for name, value in rows.items()]
        lines += [
            f'sglang:realtime_tokens_total{{{labels},mode="decode"}} {float(decoded)}',
            f"sglang:prompt_tokens_total{{{whole}}} {float(self.prompt_total)}",
            f"sglang:generation_tokens_total{{{whole}}} {float(self.output_total)}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    # --- generation ---------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        params = body.get("sampling_params") or {}
        prompt = len(body["input_ids"]) if "input_ids" in body else words(body["text"])
        most, streamed = params.get("max_new_tokens", 128), bool(body.get("stream"))
        error = self._why_not(prompt, most)
        if error is not None and not streamed:
            status, message = error
            return web.json_response({"error": {"message": message}}, status=status)
        if not streamed:
            run = await self.whole(prompt, most)
            return web.json_response({"text": "w " * run.made, "meta_info": _meta(prompt, run.made, True)})
        response = await event_stream(request)
        if error is not None:  # a stream has begun before it is looked at
            status, message = error
            refused = {"error": {"message": message, "code": status}}
            await response.write(f"data: {json.dumps(refused)}\n\ndata: [DONE]\n\n".encode())
            return response
        async for number, last in self.each(prompt, most):
            event = {"text": "w " * number, "meta_info": _meta(prompt, number, last)}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, self.bodies)
        prompt = openai.prompt_of(body)
        most = body.get("max_tokens") or (16 if "prompt" in body else self.context - prompt)
        if (error := self._why_not(prompt, most)) is not None:
            status, message = error
            kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
            refused = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
            return web.json_response(refused, status=status)
        return await openai.answer(self, request, body, prompt, most)

    def _why_not(self, prompt: int, most: int) -> tuple[int, str] | None:
        if prompt >= self.context:
            told = f"The input ({prompt} tokens) is longer than the model's context length"
            return 400, f"{told} ({self.context} tokens)."
        if prompt + most > self.context:
            told = (
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
            )
            return 400, told
        if len(self.waiting) >= self._most_queued:
            return 503, "The request queue is full."
        return None


def _meta(prompt: int, made: int, last: bool) -> dict[str, Any]:
    reason = {"type": "length", "length": made} if last else None
    return {"id": "x", "finish_reason": reason, "prompt_tokens": prompt, "completion_tokens": made}
