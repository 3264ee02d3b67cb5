"""The counter that the proxy uses: the first source that is sure, else a bound.

Law 4: only an exact count may prove a 400, so everything doubtful comes out as ``bound``.
Law 8: falling back is a state that can be seen: ``fallbacks`` counts by source and reason.

A local tokenizer is right only if it is the one that the engine runs, with the template and options that the
engine was started with. ``verify`` asks the engine for a few counts and compares, and so does ``calibration``
with what requests turn out to have had; while they differ, the local tokenizer is ``doubted`` and not used.
"""

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from kvctl.tokens.base import Count, CountingStatus, CountMethod
from kvctl.tokens.begin import prefixes_of
from kvctl.tokens.bound import SPECIALS_PER_TEXT, chat_bound, text_bound
from kvctl.tokens.calibration import Calibration, Witness
from kvctl.tokens.engine import EngineCounter
from kvctl.tokens.media import MediaBounds, without_media
from kvctl.tokens.source import FINAL, OwnTokenizer, Source, Uncountable, Why

_NO_MEDIA_BOUNDS = MediaBounds()
MOST_SAMPLED = 256 * 1024  # characters of a request that is counted twice
_LARGE = 256 * 1024  # bytes of a request that is searched and bounded off the loop
MOST_MEDIA_SCALE = 64.0

_USER = {"role": "user", "content": " Wie warm ist es in Köln? \n"}
PROBES: tuple[str | dict[str, Any], ...] = (
    "The quick brown fox, 1,234 times; naïve 東京 \U0001f600",
    " leading space,\ttab\n\n    indent == 1e-5",
    {"messages": [_USER]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            _USER,
            {"role": "assistant", "content": "21"},
            _USER,
        ]
    },
    {"messages": [_USER], "tools": [{"type": "function", "function": {"name": "f", "description": "d"}}]},
)
"""Prompts and chats that tell tokenizers, templates and their options apart."""


class ChainCounter:
    """Counts with the first of ``sources`` that can. Never raises on odd input."""

    def __init__(self, sources: Sequence[Source], *, media: MediaBounds = _NO_MEDIA_BOUNDS) -> None:
        self._sources = tuple(sources)
        self.media = media
        self.fallbacks: Tally[tuple[CountMethod, Why]] = Tally()
        self.calibration = Calibration()
        self.media_scale = 1.0  # factor on the bounds of media that usage has shown to be needed
        self._own = next((source for source in sources if isinstance(source, OwnTokenizer)), None)
        self._engine = next((source for source in sources if isinstance(source, EngineCounter)), None)
        self._samples: set[asyncio.Task[None]] = set()

    @property
    def method(self) -> CountMethod:
        """The best method at hand."""
        return next((source.method for source in self._trusted()), CountMethod.BOUND)

    @property
    def vocab_size(self) -> int | None:
        """Token ids from here on are outside the model's vocabulary; None: not known."""
        return None if self._own is None else self._own.vocab_size

    @property
    def doubted(self) -> bool:
        """Whether the local tokenizer counts differently from the engine, and so is not used."""
        return self.calibration.doubted

    def status(self) -> CountingStatus:
        """The state of counting."""
        found, own = self.calibration, self._own
        seen = 0 if own is None else own.tally.spared + own.tally.tokenised
        return CountingStatus(
            method=self.method,
            doubted=found.why,
            error_ratio=found.error_ratio,
            compared=found.samples.total(),
            known_ratio=own.tally.spared / seen if own is not None and seen else None,
            splits=own is not None and own.keeps,
        )

    @property
    def own(self) -> OwnTokenizer | None:
        """The local tokenizer; None: there is none."""
        return self._own

    @property
    def waiting(self) -> int:
        """Counts that are queued or under way."""
        return sum(getattr(source, "waiting", 0) for source in self._sources)

    async def count_text(
        self, model: str, prompts: Sequence[str], *, add_special_tokens: bool = True
    ) -> Count:
        """Tokens of each plain prompt."""

        async def count(source: Source) -> tuple[int, ...]:
            return await source.text(model, prompts, add_special_tokens=add_special_tokens)

        def bound() -> tuple[int, ...]:
            return tuple(text_bound(prompt) + SPECIALS_PER_TEXT for prompt in prompts)

        return await self._first(count, bound, sum(map(len, prompts)))

    async def count_chat(self, model: str, body: Mapping[str, Any], body_bytes: int) -> Count:
        """Tokens of a chat request; with media parts an upper bound."""
        if body_bytes > _LARGE:
            texts, media_tokens = await asyncio.to_thread(without_media, body, self.media)
        else:
            texts, media_tokens = without_media(body, self.media)

        async def count(source: Source) -> tuple[int, ...]:
            return (await source.chat(model, texts, body_bytes),)

        large = body_bytes > _LARGE
        counted = await self._first(count, lambda: (chat_bound(texts),), body_bytes, bound_in_thread=large)
        if not media_tokens:
            return counted
        media = int(media_tokens * self.media_scale)
        with_media = tuple(tokens + media for tokens in counted.prompts)
        usual = body.get("mm_processor_kwargs") is None  # larger media that a caller asked for teach nothing
        return Count(
            prompts=with_media,
            method=CountMethod.BOUND,
            seconds=counted.seconds,
            media=media if usual else 0,
        )

    def learn(self, count: Count, true: int) -> None:
        """The engine's usage says that a request counted as ``count`` had ``true`` prompt tokens."""
        counted = sum(count.prompts)
        if count.media and true > counted:
            grown = (true - counted + count.media) / count.media
            self.media_scale = min(self.media_scale * grown, MOST_MEDIA_SCALE)
        elif count.method is CountMethod.LOCAL:
            self.calibration.saw(Witness.USAGE, counted, true)

    def know_context(self, read: Callable[[], int | None]) -> None:
        """``read`` returns the engine's context length; texts far beyond it are then not tokenised at all."""
        if self._own is not None:
            self._own.context = read

    def know_engine(self, read: Callable[[], str]) -> None:
        """``read`` returns the engine's kind: each has its own API for its tokenizer."""
        for source in self._sources:
            if isinstance(source, EngineCounter):
                source.know_engine(read)

    def know_sharing(self, read: Callable[[], bool]) -> None:
        """``read`` returns whether requests that begin alike share KV tokens; else prefixes are unwanted."""
        for source in self._sources:
            if isinstance(source, OwnTokenizer | EngineCounter):
                source.begins = read

    async def verify(self, model: str) -> int | None:
        """Compare the local tokenizer with the engine's; call it whenever an engine has come up.

        Returns how many probes differ, and doubts the local tokenizer if any does. None: there is nothing to
        compare, or the engine did not answer; then nothing changes.
        """
        engine = self._engine
        if engine is not None:
            engine.forget()
        if self._own is None or engine is None:
            return None
        true = [await _probe(engine, model, probe) for probe in PROBES]
        wrong = await self._differing(self._own, model, true)
        if wrong and await self._own.other_way():
            other = await self._differing(self._own, model, true)
            if other is None or other >= wrong:
                await self._own.other_way()
            else:
                wrong = other
        if wrong is not None:
            self.calibration.probed(wrong, len(PROBES))
        return wrong

    async def _differing(self, own: OwnTokenizer, model: str, true: Sequence[int | None]) -> int | None:
        """How many probes ``own`` counts differently; None: nothing can be compared."""
        pairs = [(await _probe(own, model, p), told) for p, told in zip(PROBES, true, strict=True)]
        both = [mine != told for mine, told in pairs if mine is not None and told is not None]
        return sum(both) if both else None

    def _trusted(self) -> Iterator[Source]:
        return (s for s in self._sources if not (self.doubted and s.method is CountMethod.LOCAL))

    async def close(self) -> None:
        """Close all sources."""
        for task in self._samples:
            task.cancel()
        await asyncio.gather(*self._samples, return_exceptions=True)
        for source in self._sources:
            await source.close()

    async def _first(
        self,
        count: Callable[[Source], Awaitable[tuple[int, ...]]],
        bound: Callable[[], tuple[int, ...]],
        size: int,
        *,
        bound_in_thread: bool = False,
    ) -> Count:
        started = time.perf_counter()
        for source in self._trusted():
            try:
                prompts = await count(source)
            except Uncountable as reason:
                self.fallbacks[source.method, reason.why] += 1
                if reason.why in FINAL:
                    break
            else:
                seconds, prefixes = time.perf_counter() - started, prefixes_of(prompts)
                if size <= MOST_SAMPLED:
                    self._sample(source, count, sum(prompts))
                return Count(prompts=prompts, method=source.method, seconds=seconds, prefixes=prefixes)
        prompts = await asyncio.to_thread(bound) if bound_in_thread else bound()
        return Count(prompts=prompts, method=CountMethod.BOUND, seconds=time.perf_counter() - started)

    def _sample(
        self, source: Source, count: Callable[[Source], Awaitable[tuple[int, ...]]], counted: int
    ) -> None:
        """Now and then count by the other source too, on the side: the engine, or in doubt the local one."""
        own, engine = self._own, self._engine
        if own is None or engine is None or counted > (own.context() or counted):
            return
        other: Source = engine if source is own else own
        if not self.calibration.due(time.monotonic()):
            return
        task = asyncio.get_running_loop().create_task(self._compare(other, count, counted))
        self._samples.add(task)
        task.add_done_callback(self._samples.discard)

    async def _compare(
        self, other: Source, count: Callable[[Source], Awaitable[tuple[int, ...]]], counted: int
    ) -> None:
        self.calibration.sampling += 1
        try:
            found = sum(await count(other))
        except Uncountable:
            return
        finally:
            self.calibration.sampling -= 1
        own, true = (found, counted) if other is self._own else (counted, found)
        self.calibration.saw(Witness.TOKENIZE, own, true)


async def _probe(source: Source, model: str, probe: str | dict[str, Any]) -> int | None:
    """The source's count of a probe; None: it has none."""
    try:
        if isinstance(probe, str):
            return (await source.text(model, (probe,), add_special_tokens=True))[0]
        return await source.chat(model, probe, 512)
    except Uncountable:
        return None
