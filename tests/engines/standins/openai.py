"""The OpenAI routes that TGI, SGLang and llama.cpp have beside their own."""

import json
from typing import Any

from aiohttp import web

from tests.engines.standins.core import Standin, event_stream, words


def prompt_of(body: dict[str, Any]) -> int:
    """Prompt tokens of a chat or completion body: words."""
    if "messages" in body:
        return sum(words(str(message["content"])) for message in body["messages"])
    return words(str(body["prompt"]))


def _part(body: dict[str, Any], text: str, finish: str | None, *, stream: bool) -> dict[str, Any]:
    if "messages" not in body:
        return {"index": 0, "text": text, "finish_reason": finish}
    name = "delta" if stream else "message"
    return {"index": 0, name: {"role": "assistant", "content": text}, "finish_reason": finish}


async def answer(
    engine: Standin, request: web.Request, body: dict[str, Any], prompt: int, most: int
) -> web.StreamResponse:
    """A chat or completion answer, streamed where asked."""
    kind = "chat.completion" if "messages" in body else "text_completion"
    head = {"id": "x", "object": kind, "created": 1, "model": "m"}
    if not body.get("stream"):
        run = await engine.whole(prompt, most)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": run.made,
            "total_tokens": prompt + run.made,
        }
        choice = _part(body, "w " * run.made, "length", stream=False)
        return web.json_response({**head, "choices": [choice], "usage": usage})
    response = await event_stream(request)
    async for _, last in engine.each(prompt, most):
        choice = _part(body, "w ", "length" if last else None, stream=True)
        chunk = {**head, "choices": [choice]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
