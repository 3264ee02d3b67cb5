"""Which engine, and which rank of it, a request goes to: the candidates by model, then the choice among them.

The choice itself is made in ``kvctl.core.choice``; this module says who may be chosen. A model that no engine
can serve gets the engines' own 404 only where that is certain: where the operator named the models of every
engine. A list learnt from an engine may lack an adapter loaded since, so the engines with such lists are
asked.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvctl.core.choice import choose
from kvctl.core.claim import Prefix, Shape
from kvctl.core.outcomes import ChoiceReason
from kvctl.proxy.limits import BadRequest
from kvctl.proxy.seams import Backend, Lane

KEPT_RESPONSES = 20_000  # stored responses whose engine is remembered


class Way(msgspec.Struct, frozen=True):
    """Where a request goes, and why there."""

    backend: Backend
    lane: Lane
    reason: ChoiceReason


class Makers:
    """Which engine made which stored response; the oldest are forgotten first."""

    def __init__(self, most: int = KEPT_RESPONSES) -> None:
        self._most = most
        self._engine_of: OrderedDict[str, Backend] = OrderedDict()

    def made(self, response_id: str, backend: Backend) -> None:
        """``backend`` made the response."""
        self._engine_of[response_id] = backend
        if len(self._engine_of) > self._most:
            self._engine_of.popitem(last=False)

    def of(self, response_id: str) -> Backend | None:
        """Which engine made the response; None: not remembered."""
        return self._engine_of.get(response_id)


class Dispatch:
    """All engines behind the data port, in the operator's order. ``clock`` gives monotonic seconds."""

    def __init__(self, backends: Sequence[Backend], clock: Callable[[], float]) -> None:
        self.backends = tuple(backends)
        self.makers = Makers()
        self.several = len(backends) > 1 or any(backend.aliases for backend in backends)
        self._clock = clock

    def named(self, name: str) -> Backend | None:
        """The engine of that name."""
        return next((backend for backend in self.backends if backend.name == name), None)

    def first(self, among: Iterable[Backend] | None = None) -> Backend:
        """The first that serves callers now; where none does, the first of all."""
        candidates = list(self.backends if among is None else among)
        return next((backend for backend in candidates if backend.serving), candidates[0])

    def candidates(self, model: str, among: Sequence[Backend]) -> list[Backend] | BadRequest:
        """Those of ``among`` that may serve ``model``, or the engines' own 404 where none can.

        A ``model`` of "" stands for what the first of them serves.
        """
        wanted = model or next(iter(among[0].known_models()), "")
        found = [backend for backend in among if backend.serves(wanted)]
        if not found and not wanted:
            return [among[0]]
        return found or [each for each in among if not each.models] or _no_such_model(wanted)

    def choose(
        self,
        among: Sequence[tuple[Backend, Shape]],
        prefixes: Sequence[Prefix],
        *,
        rank: str | None = None,
    ) -> Way:
        """The best of ``among``: (engine, the request as counted for it). ``rank``: named by the caller."""
        if len(among) == 1 and len(among[0][0].lanes) == 1:
            return Way(among[0][0], among[0][0].lanes[0], ChoiceReason.ONLY)
        ways = [(backend, lane, shape) for backend, shape in among for lane in backend.lanes_for(rank)]
        if len(ways) == 1:
            return Way(ways[0][0], ways[0][1], ChoiceReason.ONLY)
        now = self._clock()
        offers = [lane.keeper.gate.offer(shape, now) for _, lane, shape in ways]
        prompt = [max(sum(shape.prompts), 1) for _, _, shape in ways]
        warm = [
            min(lane.warm.warm_tokens(shape.prefixes or prefixes) / tokens, 1.0)
            for (_, lane, shape), tokens in zip(ways, prompt, strict=True)
        ]
        at, reason = choose(offers, warm)
        return Way(ways[at][0], ways[at][1], reason)


def _no_such_model(model: str) -> BadRequest:
    return BadRequest(
        status=404,
        message=f"The model `{model[:200]}` does not exist.",
        type="NotFoundError",
        param="model",
        code=404,
    )
