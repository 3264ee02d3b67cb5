"""Tokenizers of engines that do not speak vLLM's ``/tokenize``: asked in their API, answered in vLLM's.

Law 4: a 400 needs proof. What cannot be asked for with certainty is answered with a status and no count.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Posts a JSON body to a path of the engine; (status, answer). Raises OSError or TimeoutError."""

_Words = Callable[[Post, Mapping[str, Any]], Awaitable[tuple[int, bytes]]]
_NO_COUNT = (501, b"")
_CHAT_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")


class Interpreter:
    """An ``Ask`` that takes what vLLM's /tokenize takes. ``kind`` returns the engine's name."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.kind: Callable[[], str] = lambda: "vllm"

    async def __call__(self, body: bytes) -> tuple[int, bytes]:
        """Status and ``{"count": n}``. Raises OSError or TimeoutError."""
        words = _WORDS.get(self.kind())
        if words is None:
            return await self._post("/tokenize", body)
        return await words(self._post, json.loads(body))


def http_post(
    session: aiohttp.ClientSession,
    base_url: str,
    headers: Mapping[str, str] | None = None,
    options: Callable[[], Mapping[str, Any]] = dict,
) -> Post:
    """A ``Post`` over HTTP. ``headers`` may carry the engine's API key; ``options``: the TLS in force."""
    sent = {**(headers or {}), "Content-Type": "application/json"}

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        async with session.post(base_url + path, data=body, headers=sent, **options()) as response:
            return response.status, await response.read()

    return post


async def _ask(post: Post, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Status, and what a 200 answered as JSON (None where it is none)."""
    status, answer = await post(path, json.dumps(body).encode())
    if status != 200:
        return status, None
    try:
        return status, json.loads(answer)
    except (ValueError, RecursionError):
        return _NO_COUNT[0], None


def _counted(status: int, count: object) -> tuple[int, bytes]:
    if status != 200:
        return status, b""
    return (200, json.dumps({"count": count}).encode()) if type(count) is int else _NO_COUNT


def _size(tokens: object) -> int | None:
    return len(tokens) if isinstance(tokens, list) else None


async def _llamacpp(post: Post, asked: Mapping[str, Any]) -> tuple[int, bytes]:
    """``/tokenize`` for text; for a chat the route that renders and counts it, in builds since 2026."""
    if "messages" in asked:
        chat = {key: asked[key] for key in _CHAT_FIELDS if key in asked}
        status, told = await _ask(post, "/v1/chat/completions/input_tokens", chat)
        return _counted(status, told.get("input_tokens") if isinstance(told, dict) else None)
    body = {"content": asked["prompt"], "add_special": asked.get("add_special_tokens", True)}
    status, told = await _ask(post, "/tokenize", body)
    return _counted(status, _size(told.get("tokens")) if isinstance(told, dict) else None)


async def _tgi(post: Post, asked: Mapping[str, Any]) -> tuple[int, bytes]:
    """``/tokenize`` lists the tokens of a text, special ones included; ``/chat_tokenize`` those of a chat."""
    if "messages" in asked:
        chat = {key: asked[key] for key in _CHAT_FIELDS if key in asked}
        status, told = await _ask(post, "/chat_tokenize", chat)
        return _counted(status, _size(told.get("tokenize_response")) if isinstance(told, dict) else None)
    if asked.get("add_special_tokens") is False:
        return _NO_COUNT
    status, told = await _ask(post, "/tokenize", {"inputs": asked["prompt"]})
    return _counted(status, _size(told))


_WORDS: Mapping[str, _Words] = {"llamacpp": _llamacpp, "tgi": _tgi}
