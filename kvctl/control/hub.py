"""Tells listeners what happens. Each has a bounded buffer, and one that is too slow is cut.

Without a listener a happening costs one look at an empty list: documents are made only for somebody.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

Document = dict[str, Any]

BUFFERED = 1000  # happenings by which a listener may be behind
MOST_LISTENERS = 32


class TooManyError(RuntimeError):
    """No more listeners are taken."""


class Listener:
    """One reader of the stream. ``cut`` is set when it falls behind; what it has not read is then gone."""

    def __init__(self, kinds: frozenset[str], buffered: int) -> None:
        self.kinds = kinds
        self.cut = False
        self._buffered = buffered
        self._waiting: deque[Document] = deque()
        self._news = asyncio.Event()

    def put(self, happening: Document) -> None:
        """One more to read."""
        if self.cut:
            return
        if len(self._waiting) >= self._buffered:
            self.cut = True
            self._waiting.clear()
        else:
            self._waiting.append(happening)
        self._news.set()

    async def next(self, timeout_s: float) -> list[Document]:
        """What came since the last call; empty: nothing within ``timeout_s``, or the listener was cut."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        batch = list(self._waiting)
        self._waiting.clear()
        return batch


class Hub:
    """All listeners. ``heard`` is told when the first is to come (True) and when the last left (False)."""

    def __init__(self, buffered: int = BUFFERED, heard: Callable[[bool], None] = lambda _: None) -> None:
        self._buffered = buffered
        self._tell_heard = heard
        self._listeners: list[Listener] = []
        self.heard = False  # anybody listens

    def __len__(self) -> int:
        return len(self._listeners)

    def listen(self, kinds: frozenset[str] = frozenset()) -> Listener:
        """A new listener for these kinds (none: for all). Raises TooManyError."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise TooManyError(f"{MOST_LISTENERS} listen already; end one of them")
        made = Listener(kinds, self._buffered)
        self._be(heard=True)
        self._listeners.append(made)
        return made

    def leave(self, listener: Listener) -> None:
        """The listener leaves."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._be(heard=bool(self._listeners))

    def _be(self, *, heard: bool) -> None:
        if heard != self.heard:
            self.heard = heard
            self._tell_heard(heard)

    def tell(self, kind: str, make: Callable[[], Document]) -> None:
        """Something of ``kind`` happened; ``make`` is called for its document if somebody listens."""
        wanted = [each for each in self._listeners if not each.kinds or kind in each.kinds]
        if wanted:
            happening = {"type": kind, **make()}
            for each in wanted:
                each.put(happening)
