"""Open-loop load with the openai client: seeded arrivals and lengths, its own retries."""

import asyncio
import gc
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from openai import AsyncOpenAI, RateLimitError
from tokenizers import Tokenizer

from tests.live.engine import Engine, forced_length
from tests.live.model import NAME, corpus_lines

DECLARED_CAP = 2048
MEAN_OUTPUT = 300
SIGMA = 0.8
PROMPT_TOKENS = 300
TTFT_S, TPOT_S = 2.0, 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), its prompt, and how long its answer really is."""

    at: float
    prompt: str
    output: int


@dataclass(slots=True)
class Outcome:
    """What became of a run. ``refused``: headers of those whose retries were used up.

    ``good`` counts the answers in time: TTFT_S to the first token, retries included, then TPOT_S a token.
    """

    ttft: list[float] = field(default_factory=list)
    good: int = 0
    completed: int = 0
    refused: list[Mapping[str, str]] = field(default_factory=list)
    cut: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        median, p99 = (quantiles(self.ttft, n=100)[i] for i in (49, 98)) if len(self.ttft) > 1 else (0.0, 0.0)
        return (
            f"completed {self.completed}, refused for good {len(self.refused)}, cut {self.cut}, "
            f"TTFT p50 {median:.2f} s p99 {p99:.2f} s, {self.good} in time, {self.seconds:.0f} s"
        )


def _prompt(rng: random.Random, tokenizer: Tokenizer, words: list[str]) -> str:
    """About PROMPT_TOKENS tokens that share no block with another prompt."""
    text = f"{rng.getrandbits(64):x} "
    while len(tokenizer.encode(text)) < PROMPT_TOKENS:
        text += " ".join(rng.choices(words, k=12)) + " "
    return text


def _beginning(salt: str, tokens: int, tokenizer: Tokenizer, words: list[str]) -> str:
    """A text of about so many tokens, in steps of a sentence."""
    rng, text = random.Random(f"beginning {salt}"), ""
    while len(tokenizer.encode(text)) < tokens:
        text += " ".join(rng.choices(words, k=12)) + ". "
    return text


def arrivals(
    engine: Engine, rate: float, seconds: float, seed: int, salt: str, *, common: int = 0
) -> list[Arrival]:
    """Poisson arrivals; times and lengths follow from ``seed``, the prompts' text from ``salt`` too.

    All prompts begin with the same ``common`` tokens.
    """
    rng, texts = random.Random(seed), random.Random(f"{seed} {salt}")
    tokenizer = Tokenizer.from_file(str(engine.model / "tokenizer.json"))
    words = [word for line in corpus_lines() if line.isascii() for word in line.split()]
    beginning = _beginning(salt, common, tokenizer, words)
    found, at = [], rng.expovariate(rate)
    while at < seconds:
        length = rng.lognormvariate(math.log(MEAN_OUTPUT) - SIGMA**2 / 2, SIGMA)
        output = max(4, min(DECLARED_CAP, round(length)))
        found.append(Arrival(at, beginning + _prompt(texts, tokenizer, words), output))
        at += rng.expovariate(rate)
    return found


async def _one(client: AsyncOpenAI, arrival: Arrival, outcome: Outcome) -> None:
    await asyncio.sleep(arrival.at)
    began = time.monotonic()
    body: dict[str, Any] = {
        "model": NAME,
        "prompt": arrival.prompt,
        "max_tokens": DECLARED_CAP,
        "stream": True,
    }
    try:
        async with client.completions.with_streaming_response.create(
            **body, extra_body=forced_length(arrival.output)
        ) as answer:
            tail, first_at = b"", 0.0
            async for part in answer.iter_bytes():
                first_at = first_at or time.monotonic()
                tail = (tail + part)[-64:]
            assert tail.endswith(b"data: [DONE]\n\n"), tail
            ttft, tpot = first_at - began, (time.monotonic() - first_at) / max(arrival.output - 1, 1)
            outcome.ttft.append(ttft)
            outcome.completed += 1
            outcome.good += ttft <= TTFT_S and tpot <= TPOT_S
    except RateLimitError as refusal:
        outcome.refused.append({name.lower(): text for name, text in refusal.response.headers.items()})


async def drive(base_url: str, load: list[Arrival], patience: float) -> Outcome:
    """Runs the load; what is not done ``patience`` seconds after the last arrival is cut."""
    outcome, began = Outcome(), time.monotonic()
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=2, timeout=300) as client:
        tasks = [asyncio.create_task(_one(client, arrival, outcome)) for arrival in load]
        done, pending = await asyncio.wait(tasks, timeout=load[-1].at + patience)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.gather(*done)
    gc.collect()  # see the caller: what a cut request left behind is told here, not in a later test
    outcome.cut, outcome.seconds = len(pending), time.monotonic() - began
    return outcome
