"""More than 500 varied requests, the same for the same seed: what callers send, and what they should not.

Each is a route's path and a body without its output limit. Prompts are text, or ids: nothing of it needs more
than a tokenizer and a template to be counted.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.live.model import BOS, EOS, IM_END, IM_START, NAME, corpus_lines
from tests.live.shapes import ODD_TEXTS, TOOLS

Body = dict[str, Any]
Request = tuple[str, Body]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"

CODE = (
    "def f(x: int) -> int:\n\treturn x ** 2  # squared\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}',
    "SELECT * FROM t WHERE name LIKE '%x%' AND n >= 10;\r\n",
    "<div class='a'>&nbsp;<br/></div>",
    "\\frac{\\partial f}{\\partial x} = \\sum_{i=0}^{\\infty} a_i x^i",
    "0x1F 0b101 1_000_000 3.14159 1e-10 192.168.0.1 2026-11-30T02:40:31Z",
)
SPECIAL = (BOS, EOS, IM_START, IM_END, "<|im_", "|im_end|>", "<|eot_id|>", "[INST]", "</s>", "<s", "<think>")


def _text(dice: random.Random) -> str:
    """One text of some kind."""
    lines = corpus_lines()
    kinds: tuple[Callable[[], str], ...] = (
        lambda: dice.choice(lines),
        lambda: "\n".join(dice.sample(lines, dice.randint(2, 8))),
        lambda: dice.choice(CODE) * dice.randint(1, 6),
        lambda: dice.choice(ODD_TEXTS),
        lambda: "".join(dice.choice((*SPECIAL, " ", "\n", "word")) for _ in range(dice.randint(1, 30))),
        lambda: chr(dice.choice((0x20, 0x61, 0x3D, 0xE9, 0x6771, 0x1F600))) * dice.randint(1, 700),
        lambda: "".join(chr(dice.randint(0x20, 0x2FFF)) for _ in range(dice.randint(1, 80))),
        lambda: (
            " " * dice.randint(0, 3) + dice.choice(lines)[: dice.randint(1, 40)] + "\n" * dice.randint(0, 3)
        ),
    )
    return dice.choice(kinds)()


def _content(dice: random.Random) -> Any:
    texts = [_text(dice) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _conversation(dice: random.Random) -> list[Body]:
    turns: list[Body] = []
    if dice.random() < 0.4:
        turns.append({"role": dice.choice(("system", "system", "developer")), "content": _content(dice)})
    for _ in range(dice.randint(0, 4)):
        turns += [
            {"role": "user", "content": _content(dice)},
            {"role": "assistant", "content": _text(dice)},
        ]
    return [*turns, {"role": "user", "content": _content(dice)}]


def _chat(dice: random.Random) -> Request:
    body: Body = {"messages": _conversation(dice)}
    extras: tuple[Body, ...] = (
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": dice.random() < 0.5}},
        {"add_generation_prompt": False},
        {"add_special_tokens": True},
        {"reasoning_effort": dice.choice(("low", "none"))},
        {"n": 2},
        {"stream": False, "temperature": 0.0, "seed": 7},
        {"logprobs": True, "top_logprobs": 2},
    )
    return CHAT, body | (dice.choice(extras) if dice.random() < 0.4 else {})


def _tool_chat(dice: random.Random) -> Request:
    arguments = dice.choice(('{"ort": "K\u00f6ln", "days": 3}', "{}", "", '{"nested": {"a": [1, null]}}'))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns: list[Body] = [
        *_conversation(dice),
        {"role": "assistant", "content": dice.choice((None, "", _text(dice))), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": _text(dice)},
    ]
    return CHAT, {"messages": turns, "tools": TOOLS, "tool_choice": "none"}


def _completion(dice: random.Random) -> Request:
    forms: tuple[Body, ...] = (
        {"prompt": _text(dice)},
        {"prompt": [_text(dice) for _ in range(dice.randint(1, 4))]},
        {"prompt": [dice.randint(4, 999) for _ in range(dice.randint(1, 200))]},
        {"prompt": [[dice.randint(4, 999)] * dice.randint(1, 9) for _ in range(dice.randint(1, 3))]},
        {"prompt": _text(dice), "add_special_tokens": False},
        {"prompt": _text(dice), "echo": True, "n": 2},
    )
    body = dice.choice(forms)
    return COMPLETIONS, {"prompt": "x"} | body if body["prompt"] else {"prompt": "x"}


def _response(dice: random.Random) -> Request:
    turns = [{"role": turn["role"], "content": _text(dice)} for turn in _conversation(dice)]
    forms: tuple[Body, ...] = (
        {"input": _text(dice)},
        {"input": _text(dice), "instructions": _text(dice)},
        {"input": [turn for turn in turns if turn["role"] != "developer"]},
    )
    return RESPONSES, dice.choice(forms)


def _message(dice: random.Random) -> Request:
    turns = [turn for turn in _conversation(dice) if turn["role"] in ("user", "assistant")]
    forms: tuple[Body, ...] = (
        {},
        {"system": _text(dice)},
        {"system": [{"type": "text", "text": _text(dice)}]},
    )
    return MESSAGES, {"messages": turns} | dice.choice(forms)


_KINDS = ((_chat, 210), (_tool_chat, 50), (_completion, 150), (_response, 50), (_message, 60))


def requests(seed: int = 5) -> Iterator[Request]:
    """All of them."""
    dice = random.Random(seed)
    for kind, number in _KINDS:
        for _ in range(number):
            path, body = kind(dice)
            yield path, {"model": NAME} | body


_LIMITS = {RESPONSES: "max_output_tokens"}


def limited(path: str, body: Body, tokens: int) -> Body:
    """The body with an output limit, where its route looks for one."""
    return body | {_LIMITS.get(path, "max_tokens"): tokens}


def used(answer: Body) -> tuple[int, int]:
    """Prompt and output tokens of an answer's usage, over all its prompts."""
    usage = answer["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    return int(prompt), int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
