"""Asks an engine, or kvctl before it, with one client library after another; runs in their environment.

``python clients_ask.py BASE_URL MODEL``: one JSON object on standard output, by case what the caller got:
text, finish, usage, or the name of the exception and its status. What is new in every answer is left out.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from langchain_openai import ChatOpenAI

QUESTION = [{"role": "user", "content": "Zähle bis drei, 数到三."}]
FIXED = {"temperature": 0}
TURN: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24}


def main(base_url: str, model: str) -> dict[str, Any]:
    """All cases' outcomes."""
    api: Any = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)
    messages = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    chain = ChatOpenAI(
        base_url=f"{base_url}/v1", api_key="none", model=model, temperature=0, max_tokens=24, max_retries=0
    )
    cases: dict[str, Callable[[], Any]] = {
        "openai chat": lambda: _choice(api.chat.completions.create(model=model, temperature=0, **TURN)),
        "openai chat, streamed": lambda: _streamed(api, model),
        "openai text": lambda: _choice(
            api.completions.create(model=model, prompt="Hello, ", max_tokens=24, temperature=0)
        ),
        "openai, seeded": lambda: _choice(
            api.chat.completions.create(model=model, temperature=1, seed=7, n=2, **TURN)
        ),
        "openai responses": lambda: _response(api, model),
        "openai models": lambda: [each.id for each in api.models.list().data],
        "openai, too long": lambda: api.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=10_000_000
        ),
        "openai, no such model": lambda: api.chat.completions.create(model="absent", **TURN),
        "openai, a bad limit": lambda: api.chat.completions.create(
            model=model, messages=QUESTION, max_tokens="many"
        ),
        "anthropic": lambda: _message(messages.messages.create(model=model, extra_body=FIXED, **TURN)),
        "anthropic, streamed": lambda: _message_stream(messages, model),
        "langchain": lambda: _said(chain.invoke("Count to three.")),
        "langchain, streamed": lambda: "".join(str(part.content) for part in chain.stream("Count to three.")),
        "langchain, in a batch": lambda: [_said(each) for each in chain.batch(["One", "Two", "Three"])],
    }
    return {name: _outcome(case) for name, case in cases.items()}


def _outcome(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return {"raised": type(error).__name__, "status": error.status_code}


def _choice(answer: Any) -> Any:
    found = answer.model_dump(exclude={"id", "created"}, exclude_none=True)
    for choice in found["choices"]:
        choice.pop("id", None)
    return found


def _streamed(api: Any, model: str) -> Any:
    text, finish, usage = "", None, None
    options = {"include_usage": True}
    for part in api.chat.completions.create(
        model=model, temperature=0, stream=True, stream_options=options, **TURN
    ):
        for choice in part.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = part.usage.model_dump(exclude_none=True) if part.usage else usage
    return {"text": text, "finish": finish, "usage": usage}


def _response(api: Any, model: str) -> Any:
    answer = api.responses.create(model=model, input="Hello, ", max_output_tokens=24, temperature=0)
    return {"text": answer.output_text, "status": answer.status}


def _message(answer: Any) -> Any:
    return answer.model_dump(exclude={"id"}, exclude_none=True)


def _message_stream(api: anthropic.Anthropic, model: str) -> Any:
    with api.messages.stream(model=model, extra_body=FIXED, **TURN) as stream:
        text = "".join(stream.text_stream)
        return {"text": text, "whole": _message(stream.get_final_message())}


def _said(answer: Any) -> Any:
    told = answer.response_metadata
    return {"text": answer.content, "finish": told.get("finish_reason"), "usage": answer.usage_metadata}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:]), indent=1, ensure_ascii=False))
