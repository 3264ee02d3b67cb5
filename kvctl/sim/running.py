"""One request on its way through the simulated engine."""

import asyncio

from kvctl.sim.engine import SimulatedEngine
from kvctl.sim.requests import Generation
from kvctl.sim.scheduler import Finish, Sequence


class Run:
    """A request's sequences and the tokens that came and were not read yet."""

    def __init__(self, engine: SimulatedEngine, generation: Generation, serial: int) -> None:
        self.generation = generation
        self._engine = engine
        self._tokens: asyncio.Queue[tuple[int, int, Finish | None]] = asyncio.Queue()
        caps = [cap for cap in generation.max_outputs for _ in range(generation.n)]
        prompts = [prompt for prompt in generation.prompts for _ in range(generation.n)]
        each = generation.hashes or ((),) * len(generation.prompts)
        hashes = [one for one in each for _ in range(generation.n)]
        self.sequences = [
            Sequence(id=f"{serial}-{index}", prompt=prompt, max_output=cap, true_output=true, hashes=known)
            for index, (prompt, cap, true, known) in enumerate(
                zip(prompts, caps, generation.true_outputs, hashes, strict=True)
            )
        ]
        self._place = {sequence: index for index, sequence in enumerate(self.sequences)}
        self._open = len(self.sequences)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as usage counts them: each prompt once, whatever n."""
        return sum(self.generation.prompts)

    @property
    def output_tokens(self) -> int:
        """Tokens answered so far."""
        return 0 if self.generation.scoring else sum(sequence.output for sequence in self.sequences)

    def submit(self) -> None:
        """Hand it to the engine."""
        for sequence in self.sequences:
            self._engine.submit(sequence, self._sink)

    def abort(self) -> None:
        """Nobody wants the rest."""
        for sequence in self.sequences:
            self._engine.abort(sequence)

    def _sink(self, sequence: Sequence, finish: Finish | None) -> None:
        self._tokens.put_nowait((self._place[sequence], sequence.output - 1, finish))

    async def next(self) -> list[tuple[int, int, Finish | None]]:
        """The tokens that came since: (sequence, position, finish) each; an empty list at the end."""
        if not self._open:
            return []
        batch = [await self._tokens.get()]
        while not self._tokens.empty():
            batch.append(self._tokens.get_nowait())
        self._open -= sum(finish is not None for _, _, finish in batch)
        return batch
