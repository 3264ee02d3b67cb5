"""The JSON of answers, whole and as stream events, in the shape of vLLM's OpenAI API."""

import json
import time
from typing import Any

from kvctl.sim import text
from kvctl.sim.scheduler import Finish


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def usage(prompt: int, output: int) -> dict[str, Any]:
    """The usage object."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


class Answer:
    """Builds one request's answer. ``chat``: the API's shape; its id holds ``request_id``, as in vLLM."""

    def __init__(self, *, chat: bool, model: str, request_id: str) -> None:
        self._chat = chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._event_head = {**self._head, "object": "chat.completion.chunk"} if chat else self._head
        self._prefix = _compact(self._event_head)[:-1] + ',"choices":[{"index":'

    def whole(self, outputs: list[tuple[int, Finish]], prompt_tokens: int) -> dict[str, Any]:
        """The answer of a request that does not stream: output tokens and finish of each sequence."""
        choices = [self._choice(index, tokens, finish) for index, (tokens, finish) in enumerate(outputs)]
        return {**self._head, "choices": choices, "usage": usage(prompt_tokens, sum(t for t, _ in outputs))}

    def _choice(self, index: int, tokens: int, finish: Finish) -> dict[str, Any]:
        content = "".join(text.word(position) for position in range(tokens))
        body: dict[str, Any] = (
            {"message": {"role": "assistant", "content": content}} if self._chat else {"text": content}
        )
        return {"index": index, **body, "logprobs": None, "finish_reason": str(finish), "stop_reason": None}

    def opening(self, index: int) -> bytes:
        """The event that comes before a chat sequence's first token; nothing for completions."""
        return self._event(index, '"delta":{"role":"assistant","content":""}', "null") if self._chat else b""

    def token(self, index: int, position: int, finish: Finish | None) -> bytes:
        """The event of one token."""
        word = text.word(position)
        body = f'"delta":{{"content":"{word}"}}' if self._chat else f'"text":"{word}"'
        return self._event(index, body, "null" if finish is None else f'"{finish}"')

    def closing(self, prompt_tokens: int, output_tokens: int, *, with_usage: bool) -> bytes:
        """What ends a stream."""
        if not with_usage:
            return b"data: [DONE]\n\n"
        last: dict[str, Any] = {
            **self._event_head,
            "choices": [],
            "usage": usage(prompt_tokens, output_tokens),
        }
        return f"data: {_compact(last)}\n\ndata: [DONE]\n\n".encode()

    def _event(self, index: int, body: str, finish: str) -> bytes:
        tail = f'{index},{body},"logprobs":null,"finish_reason":{finish},"token_ids":null}}]}}'
        return f"data: {self._prefix}{tail}\n\n".encode()
