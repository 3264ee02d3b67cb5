r"""What happened of late, for people: the last decisions, and the stream of happenings.

gatekeeper --events, commands--> recorder --> ring, file
                                          \-> hub --> listeners of GET /v1/events
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from kvctl.control import decision_documents as documents
from kvctl.control.decision_file import KEPT, DecisionFile
from kvctl.control.decision_log import DecisionRecorder, Sink
from kvctl.control.decision_search import FARTHEST, search
from kvctl.control.gatekeeper import Gatekeeper
from kvctl.control.hub import Hub
from kvctl.core.decisions import EndRecord, Kept, Ring, Story, made
from kvctl.core.events import BudgetChanged, Command, EngineRestarted, Noted, StateChanged

Document = dict[str, Any]
_AT_ONCE = 500  # stories
_WHICH_ID = (
    "the ID is the answer's X-Request-Id; what was refused before it was weighed, such as a faulty body, "
    "is no decision"
)
_KINDS_OF_ANSWERS = ("chatcmpl-", "cmpl-")  # vLLM puts them before the X-Request-Id
KINDS = (
    *("decision", "end", "budget", "state", "restart", "note"),
    *("override", "traffic", "reload", "level", "gpu"),
)


class Journal:
    """One for the daemon, over all engines. ``close`` writes the file out."""

    def __init__(
        self,
        size: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        file: DecisionFile | None = None,
    ) -> None:
        """``size`` decisions are remembered. ``clock`` is monotonic, ``wall`` seconds since the epoch."""
        self.ring = Ring(size)
        self.hub = Hub(heard=self._heard)
        self._keepers: WeakSet[Gatekeeper] = WeakSet()
        self.file = file
        self._sinks: list[Sink] = [self.ring.add] if file is None else [self.ring.add, file.put]
        self._clock = clock
        self._wall = wall

    def watch(self, engine: str, keeper: Gatekeeper) -> None:
        """Keep the decisions and changes of an engine's gate."""
        keeper.record(DecisionRecorder(engine, keeper.moment, self._sinks))
        keeper.hurry = self.hub.heard
        self._keepers.add(keeper)
        keeper.observe(
            lambda command: self._tell_command(engine, command),
            *(BudgetChanged, StateChanged, EngineRestarted, Noted),
        )

    def start(self) -> None:
        """Write the file from now on."""
        if self.file is not None:
            self.file.start()

    async def close(self) -> None:
        """Write the file out."""
        self.settle()
        if self.file is not None:
            await self.file.close()

    def settle(self) -> None:
        """Have everything that happened at the gates written down, before anybody reads it."""
        for keeper in tuple(self._keepers):
            keeper.settle()

    def _heard(self, heard: bool) -> None:
        """The first listener is about to come, or the last has left."""
        for keeper in tuple(self._keepers):
            keeper.settle()
            keeper.hurry = heard
        if heard:
            self._sinks.append(self._tell_entry)
        else:
            self._sinks.remove(self._tell_entry)

    def tell(self, kind: str, document: Document) -> None:
        """Something else happened: an override, a drain, a reload."""
        self.hub.tell(kind, lambda: {"time": documents.stamp(self._wall()), **document})

    # --- what is asked ------------------------------------------------------------------------------

    def find(self, some_id: str) -> Document | None:
        """The story of a request by its X-Request-Id or lease id; None: not among those remembered.

        The id in the body of an answer of vLLM will do too: it is the X-Request-Id with the kind before it.
        """
        self.settle()
        found = (story for each in _names(some_id) if (story := self.ring.find(each)) is not None)
        story = next(found, None)
        return None if story is None else self.document(story)

    async def find_written(
        self, some_id: str, in_thread: Callable[[Callable[[], Document | None]], Awaitable[Document | None]]
    ) -> Document | None:
        """The same from the decision log's file; None: there is no file, or the story is not near its end."""
        if self.file is not None:
            for each in _names(some_id):
                if (found := await in_thread(partial(search, self.file.path, KEPT, each))) is not None:
                    return found
        return None

    def missing(self, some_id: str) -> str:
        """The message about a request that was not found anywhere."""
        where = f"{some_id!r:.80} is not among the last {len(self.ring)} decisions"
        if self.file is None:
            where += ", and decision_log_file, which would keep more of them, is not set"
        else:
            where += f", nor in the last {FARTHEST >> 20} MiB of decision_log_file ({self.file.path})"
        return f"{where}; {_WHICH_ID}"

    async def select(self, most: int, *, refused: bool = False) -> list[Story]:
        """Up to ``most`` of the last decisions, the latest last; ``refused``: only refusals."""
        found: list[Story] = []
        async for some in self._latest_first():
            if len(found) >= most:
                break
            found += [each for each in some if not refused or each.decision.reason is not None]
        return found[:most][::-1]

    def document(self, story: Story) -> Document:
        """A story as the API shows it."""
        return documents.story(story, self._offset())

    def file_document(self) -> Document | None:
        """The state of the file; None: there is none."""
        return None if self.file is None else _file(self.file)

    async def last(self, seconds: float) -> list[Story]:
        """The stories of the last ``seconds``, the latest first."""
        oldest, found = self._clock() - seconds, []
        async for some in self._latest_first():
            found += [each for each in some if each.decision.at >= oldest]
            if some and some[-1].decision.at < oldest:
                break
        return found

    async def _latest_first(self) -> AsyncIterator[list[Story]]:
        """The stories remembered now, in batches between which the event loop gets its turn."""
        self.settle()
        ids = self.ring.ids()
        for at in range(0, len(ids), _AT_ONCE):
            yield [found for each in ids[at : at + _AT_ONCE] if (found := self.ring.find(each)) is not None]
            await asyncio.sleep(0)

    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return self._wall()

    def resize(self, size: int) -> None:
        """Remember ``size`` decisions from now on."""
        self.ring.resize(size)

    def _offset(self) -> float:
        return self._wall() - self._clock()

    # --- what is told -------------------------------------------------------------------------------

    def _tell_entry(self, kept: Kept) -> None:
        def told() -> Document:
            entry = made(kept)
            shown = documents.line(entry, entry.at + self._offset())
            del shown["v"], shown["type"]
            return shown

        self.hub.tell("end" if isinstance(kept, EndRecord) else "decision", told)

    def _tell_command(self, engine: str, command: Command) -> None:
        if not self.hub.heard:
            return
        match command:
            case BudgetChanged():
                told = {"before": command.before_tokens, "after": command.after_tokens}
                named = {"reason": command.reason, "sentence": command.sentence}
                self.tell("budget", {"engine": engine, **told, **named})
            case StateChanged():
                told_state = {"before": command.before, "after": command.after, "sentence": command.sentence}
                self.tell("state", {"engine": engine, **told_state})
            case EngineRestarted():
                self.tell("restart", {"engine": engine, "rank": command.rank})
            case Noted():
                self.tell("note", {"engine": engine, "word": command.word, "sentence": command.sentence})
            case _:
                pass


def _file(file: DecisionFile) -> Document:
    return {
        "path": str(file.path),
        "written": file.written,
        "dropped": file.dropped,
        "fault": file.fault or None,
    }


def _names(some_id: str) -> list[str]:
    """What a request may be known by, that id first."""
    own = [some_id.removeprefix(kind) for kind in _KINDS_OF_ANSWERS if some_id.startswith(kind)]
    return [some_id, *own]
