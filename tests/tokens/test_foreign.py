"""An engine's tokenizer asked in the engine's own words."""

import json
from typing import Any

import pytest

from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import EngineCounter
from kvctl.tokens.foreign import Interpreter
from kvctl.tokens.source import Uncountable

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Engine:
    """Answers each path with what it is given."""

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.asked.append((path, json.loads(body)))
        status, answer = self._answers.get(path, (404, None))
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()


def counter(engine: Engine, kind: str) -> EngineCounter:
    made = EngineCounter(Interpreter(engine.post))
    ChainCounter([made]).know_engine(lambda: kind)
    return made


async def test_vllm_and_who_speaks_like_it_get_the_body_as_it_is() -> None:
    engine = Engine({"/tokenize": (200, {"count": 5})})
    assert await counter(engine, "sglang").text("m", ["a"], add_special_tokens=True) == (5,)
    assert engine.asked == [("/tokenize", {"model": "m", "prompt": "a", "add_special_tokens": True})]


@pytest.mark.parametrize("special", [True, False])
async def test_llamacpp_text(special: bool) -> None:
    engine = Engine({"/tokenize": (200, {"tokens": [1, 259, 268]})})
    assert await counter(engine, "llamacpp").text("m", ["a b"], add_special_tokens=special) == (3,)
    assert engine.asked == [("/tokenize", {"content": "a b", "add_special": special})]


async def test_llamacpp_chat() -> None:
    engine = Engine({"/v1/chat/completions/input_tokens": (200, {"input_tokens": 27})})
    assert await counter(engine, "llamacpp").chat("m", CHAT, 50) == 27
    assert engine.asked[0][1]["messages"] == CHAT["messages"]


async def test_tgi_text_and_chat() -> None:
    tokens = [{"id": 1, "text": "a", "start": 0, "stop": 1}] * 4
    answers = {"/tokenize": (200, tokens), "/chat_tokenize": (200, {"tokenize_response": tokens * 2})}
    engine = Engine(answers)
    asked = counter(engine, "tgi")
    assert await asked.text("m", ["a"], add_special_tokens=True) == (4,)
    assert await asked.chat("m", CHAT, 50) == 8
    assert engine.asked[0] == ("/tokenize", {"inputs": "a"})


async def test_tgi_cannot_be_asked_without_special_tokens() -> None:
    engine = Engine({"/tokenize": (200, [])})
    with pytest.raises(Uncountable):
        await counter(engine, "tgi").text("m", ["a"], add_special_tokens=False)
    assert engine.asked == []


@pytest.mark.parametrize("kind", ["llamacpp", "tgi"])
@pytest.mark.parametrize(
    "answer",
    [(404, None), (200, None), (200, b"{"), (200, {}), (200, {"tokens": 3, "input_tokens": "3"}), (503, [])],
)
async def test_what_is_no_count_proves_nothing(kind: str, answer: tuple[int, Any]) -> None:
    paths = ("/tokenize", "/v1/chat/completions/input_tokens", "/chat_tokenize")
    asked = counter(Engine(dict.fromkeys(paths, answer)), kind)
    with pytest.raises(Uncountable):
        await asked.text("m", ["a"], add_special_tokens=True)
    with pytest.raises(Uncountable):
        await asked.chat("m", CHAT, 50)
