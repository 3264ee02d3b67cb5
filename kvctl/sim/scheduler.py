"""A continuous-batching scheduler over a paged KV pool, as vLLM's V1 scheduler behaves.

Pure and discrete-event: no clock, no IO, no randomness. ``plan`` decides a step and says how long it
takes, the owner lets that time pass (really, or by adding it to a number), ``commit`` brings the step's
tokens.

The behaviour that overload is made of, and that a gate must foresee:

* running sequences go first, one token each, or a chunk of the prompt while the step's token budget
  lasts;
* waiting is first come first served, and its head blocks all behind it;
* that a sequence's whole prompt fits the free blocks is *checked* when it starts, but blocks are taken
  chunk by chunk, so growing answers may eat them meanwhile, and where a step is shared among prompts
  (``long_prefill_tokens``) two can pass on the same free blocks;
* when a running sequence finds no block, the last of the running is preempted: all its blocks are freed,
  it goes to the *front* of waiting and later computes prompt and output so far again;
* nothing is started in a step that preempted;
* a sequence that outgrows the whole pool waits for ever, and all behind it, as on engines that do not
  check;
* with prefix caching a sequence that starts takes over the blocks of its beginning that are still there, all
  but the one of its last token, and computes the rest. Full blocks of prompts are kept, of answers none.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

from kvctl.sim.blocks import BlockPool
from kvctl.sim.cache import CachingPool
from kvctl.sim.profiles import Profile


class Finish(StrEnum):
    """Why a sequence ended: the engine's ``finished_reason``."""

    STOP = "stop"  # the answer was complete
    LENGTH = "length"  # its max_tokens, or the context
    ABORT = "abort"  # the client left


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. The pool may be smaller than one context (real engines refuse that)."""

    profile: Profile
    blocks: int = 1000
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_tokens: int = 0  # most prompt tokens of one sequence in a step; 0: as many as the step has
    prefix_caching: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence. ``true_output`` is the length at which the answer is complete, ``max_output`` its cap.

    ``computed`` tokens have their KV in ``blocks``; the last token sampled is computed in the step after.
    ``hashes``: of the full blocks of its prompt, each of all tokens up to its end; none: it shares nothing.
    """

    id: str
    prompt: int
    max_output: int
    true_output: int
    output: int = 0
    computed: int = 0
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.prompt, self.max_output, self.true_output) < 1:
            raise ValueError(f"not a sequence: {self}")

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt + self.output

    @property
    def decoding(self) -> bool:
        """Whether its next step computes the one token sampled last."""
        return self.output > 0 and self.tokens - self.computed == 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A sequence's part of a step."""

    sequence: Sequence
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step: what is computed, what had to yield, and how long it takes."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence's new token; ``finish`` set on its last one."""

    sequence: Sequence
    finish: Finish | None


@dataclass(slots=True)
class Counters:
    """What the engine has counted since it started."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of each sequence once, when its first token comes
    computed_prompt_tokens: int = 0  # recomputation included
    prefix_queries: int = 0  # prompt tokens looked up in the cache, of each sequence once
    prefix_hits: int = 0  # found there
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))


class Scheduler:
    """One engine rank. Call ``plan`` and ``commit`` in turn; ``add`` and ``abort`` at any time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.cache = CachingPool(config.blocks, config.block_size) if config.prefix_caching else None
        self.pool = self.cache or BlockPool(config.blocks, config.block_size)
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    @property
    def usage_ratio(self) -> float:
        """KV usage as the engine's gauge shows it: relative to the pool without the null block."""
        return self.pool.usage_ratio

    @property
    def idle(self) -> bool:
        """Whether there is no sequence at all."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to waiting. Raises ValueError if its prompt leaves no room in the context."""
        if sequence.prompt >= self.config.max_model_len:
            raise ValueError(f"prompt of {sequence.prompt} in a context of {self.config.max_model_len}")
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Take a sequence off wherever it is and free its blocks; False if it had ended."""
        queue: list[Sequence] | deque[Sequence]
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                self._end(sequence, Finish.ABORT)
                return True
        return False

    def plan(self) -> Plan | None:
        """The next step, its blocks already taken; None if nothing can run."""
        budget = self.config.max_num_batched_tokens
        chunks, preempted, budget = self._plan_running(budget)
        if not preempted:
            chunks += self._plan_waiting(budget)
        if not chunks:
            return None
        return Plan(chunks=tuple(chunks), preempted=tuple(preempted), seconds=self._seconds(chunks))

    def commit(self, plan: Plan) -> list[Sampled]:
        """Bring the tokens of a planned step. Sequences aborted since are left out."""
        self.counters.steps += 1
        sampled = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not sequence.blocks:
                continue
            if not sequence.decoding:
                self.counters.computed_prompt_tokens += chunk.tokens
            sequence.computed += chunk.tokens
            if sequence.computed == sequence.tokens:
                sampled.append(self._sample(sequence))
        ended = {id(one.sequence) for one in sampled if one.finish is not None}
        if ended:
            self.running = [sequence for sequence in self.running if id(sequence) not in ended]
        return sampled

    def glidable(self, longest: int) -> int:
        """Steps, at most ``longest``, that are sure to do nothing but bring each running sequence a token.

        All running decode, the head of waiting cannot start, nobody ends and the pool suffices.
        """
        running = self.running
        if not running or len(running) > self.config.max_num_batched_tokens or self._head_can_start():
            return 0
        steps = longest
        for sequence in running:
            if sequence.computed + 1 != sequence.prompt + sequence.output or not sequence.output:
                return 0
            steps = min(steps, self._left(sequence) - 1)
        while steps > 0 and self._missing(steps) > self.pool.free:
            steps //= 2
        return steps

    def glide_seconds(self, steps: int) -> list[float]:
        """How long each of the next ``steps`` steps of a glide takes."""
        count, held = len(self.running), sum([sequence.computed for sequence in self.running])
        seconds = self.config.profile.step_seconds
        return [
            seconds(prefill_tokens=0, decode_sequences=count, kv_tokens=held + step * count)
            for step in range(steps)
        ]

    def glide(self, steps: int, *, under_way: bool) -> None:
        """``steps`` glidable steps are over; ``under_way``: another has taken its blocks and computes."""
        ahead = 1 if under_way else 0
        size, take = self.config.block_size, self.pool.take
        for sequence in self.running:
            sequence.computed += steps
            sequence.output += steps
            missing = -(-(sequence.computed + ahead) // size) - len(sequence.blocks)
            if missing > 0:
                sequence.blocks += take(missing) or ()
        self.counters.generation_tokens += steps * len(self.running)
        self.counters.steps += steps

    def step_under_way(self) -> Plan:
        """The step of a glide that has taken its blocks, as a plan to commit."""
        chunks = tuple(Chunk(sequence, 1) for sequence in self.running)
        return Plan(chunks=chunks, preempted=(), seconds=self._seconds(chunks))

    def _head_can_start(self) -> bool:
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        return self._fits(self.waiting[0], self._cached(self.waiting[0]))

    def _cached(self, sequence: Sequence) -> list[int]:
        """The blocks that a sequence would find: the last token is always computed."""
        if self.cache is None or not sequence.hashes:
            return []
        return self.cache.find(sequence.hashes, (sequence.tokens - 1) // self.config.block_size)

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether a sequence that finds those blocks can start."""
        missing = self.pool.blocks_for(sequence.tokens) - len(cached)
        if self.cache is not None and cached:
            missing += self.cache.idle_among(cached)
        return missing <= self.pool.free

    def _take_over(self, sequence: Sequence, cached: list[int]) -> None:
        if self.cache is None:
            return
        self.cache.read(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self.config.block_size
        if not sequence.preemptions:
            self.counters.prefix_queries += sequence.tokens
            self.counters.prefix_hits += sequence.computed

    def _left(self, sequence: Sequence) -> int:
        """Tokens until ``sequence`` ends."""
        most = min(sequence.true_output, sequence.max_output, self.config.max_model_len - sequence.prompt)
        return most - sequence.output

    def _missing(self, steps: int) -> int:
        """Blocks that all running need more for ``steps`` tokens each."""
        size = self.config.block_size
        return sum([-(-(one.computed + steps) // size) - len(one.blocks) for one in self.running])

    def _plan_running(self, budget: int) -> tuple[list[Chunk], list[Sequence], int]:
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = self._chunk(sequence, budget)
            while not self._allocate(sequence, tokens):
                preempted.append(self._preempt_last())
                if preempted[-1] is sequence:
                    return chunks, preempted, budget
            chunks.append(Chunk(sequence, tokens))
            budget -= tokens
            index += 1
        return chunks, preempted, budget

    def _plan_waiting(self, budget: int) -> list[Chunk]:
        chunks = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            cached = self._cached(sequence)
            if not self._fits(sequence, cached):
                break
            self._take_over(sequence, cached)
            tokens = self._chunk(sequence, budget)
            self._allocate(sequence, tokens)
            self.running.append(self.waiting.popleft())
            chunks.append(Chunk(sequence, tokens))
            budget -= tokens
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of ``sequence`` to compute in a step that has ``budget`` left."""
        most = self.config.long_prefill_tokens or budget
        return min(sequence.tokens - sequence.computed, budget, most)

    def _allocate(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for ``tokens`` more of ``sequence``; False if the pool has too few."""
        missing = self.pool.blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        if missing > 0:
            taken = self.pool.take(missing)
            if taken is None:
                return False
            sequence.blocks += taken
        if self.cache is not None and sequence.computed < sequence.prompt:
            size = self.config.block_size
            full = range(sequence.computed // size, (sequence.computed + tokens) // size)
            for index in full[: max(len(sequence.hashes) - full.start, 0)]:
                self.cache.keep(sequence.blocks[index], sequence.hashes[index])
        return True

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self.pool.give_back(victim.blocks)
        victim.computed = 0
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _sample(self, sequence: Sequence) -> Sampled:
        if sequence.output == 0:
            self.counters.prompt_tokens += sequence.prompt
        sequence.output += 1
        self.counters.generation_tokens += 1
        finish = self._finish_of(sequence)
        if finish is not None:
            self._end(sequence, finish)
        return Sampled(sequence, finish)

    def _finish_of(self, sequence: Sequence) -> Finish | None:
        if sequence.output >= sequence.true_output:
            return Finish.STOP
        if sequence.output >= sequence.max_output or sequence.tokens >= self.config.max_model_len:
            return Finish.LENGTH
        return None

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        self.pool.give_back(sequence.blocks)
        self.counters.finished[finish] += 1

    def _seconds(self, chunks: Collection[Chunk]) -> float:
        decoding = sum(chunk.sequence.decoding for chunk in chunks)
        return self.config.profile.step_seconds(
            prefill_tokens=sum(chunk.tokens for chunk in chunks) - decoding,
            decode_sequences=decoding,
            kv_tokens=sum(chunk.sequence.computed for chunk in chunks),
        )
