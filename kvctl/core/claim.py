"""Request shape -> sequences and worst-case KV tokens.

Law 4: a 400 needs proof. ``never_fits`` answers only for an exact count against a known limit.

Each of the (prompts x n) sequences with prompt ``p`` and allowed output ``m`` claims
``ceil((p + m) / block) x block`` KV tokens. ``m`` is what the caller asks for, else the engine's own
default for the route; either is held to ``context - p``, since the engine generates no further.
"""

from dataclasses import field
from math import inf

from kvctl.core.outcomes import RejectReason
from kvctl.core.records import record

Prefix = tuple[tuple[int, int], ...]
"""How a prompt begins: ``(tokens, hash)`` at some borders, tokens ascending. Where hashes are equal, all
tokens up to there are."""


@record(kw_only=True)
class Shape:
    """What a request asks of the engine, counted in tokens.

    ``asked_output`` is the caller's limit (None: none sent). ``default_output`` is what the engine takes
    when none is sent (None: what is left of the context). ``exact`` says that ``prompts`` was counted with
    the served model's own tokenizer and not bounded. ``prefixes`` has one entry a prompt, or none at all.
    ``priority`` is as vLLM has it: the lower, the sooner.
    """

    route: str
    model: str
    prompts: tuple[int, ...]
    n: int = 1
    asked_output: int | None = None
    default_output: int | None = None
    stream: bool = False
    tenant: str = ""
    exact: bool = True
    prefixes: tuple[Prefix, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.prompts or min(self.prompts) < 0 or self.n < 1 or (self.asked_output or 0) < 0:
            raise ValueError(f"not a request shape: {self}")


@record(kw_only=True)
class Limits:
    """What bounds a single request on one rank. None: not known."""

    context: int | None = None  # the engine's max_model_len
    max_context: int | None = None  # the operator's cap
    rank_capacity: int | None = None  # usable KV tokens of the largest rank
    capacity_exact: bool = False
    block: int = 16
    clamps_output: bool = True  # the engine shortens prompt + asked to its context instead of refusing
    unknown_output: int = 4096  # worst case of an unlimited request where neither context nor pool is known
    least: float = field(init=False)  # a sequence of so many tokens is within each of these limits
    ends_in_pool: bool = field(init=False)  # the engine's context ends any sequence within the pool

    def __post_init__(self) -> None:
        known = self.rank_capacity is not None and self.capacity_exact
        pool = (self.rank_capacity or 0) // self.block * self.block if known else inf
        context, most = (inf if one is None else one for one in (self.context, self.max_context))
        object.__setattr__(self, "least", min(context, most, pool))
        object.__setattr__(self, "ends_in_pool", self.context is not None and context <= pool)


@record
class Claim:
    """Worst case of a request: per prompt its length and allowed output, ``n`` sequences of each.

    ``tokens`` is the whole, shared parts included. ``prefixes`` says how each prompt begins; (): that is not
    known, and each sequence counts by itself.
    """

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]  # allowed output per sequence of the prompt at the same place
    n: int
    block: int
    tokens: int
    sequences: int  # that the engine will run for this request
    prefixes: tuple[Prefix, ...] = ()

    @property
    def largest_sequence(self) -> int:
        """Worst case of the largest single sequence, KV tokens."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return max(round_up(p + m, self.block) for p, m in pairs)


@record(kw_only=True)
class NeverFits:
    """The proof behind a 400: what was needed, the limit, and the largest output limit that would fit."""

    reason: RejectReason
    prompt_tokens: int
    needed_tokens: int
    limit_tokens: int
    largest_output: int  # 0: the prompt alone is too long


def round_up(tokens: int, block: int) -> int:
    """Tokens as the pool hands them out: whole blocks."""
    return -(-tokens // block) * block


def allowed_output(shape: Shape, prompt: int, limits: Limits) -> int:
    """Output tokens that the engine may generate for one sequence of ``prompt`` tokens.

    The operator's ``max_context`` plays no part: it refuses requests, it does not stop the engine.
    """
    wanted = shape.asked_output if shape.asked_output is not None else shape.default_output
    if wanted is None:
        return _unlimited_output(shape, prompt, limits)
    if limits.context is None or prompt + wanted <= limits.context:
        return wanted
    return max(limits.context - prompt, 0)


def _unlimited_output(shape: Shape, prompt: int, limits: Limits) -> int:
    """No limit sent, none by default: the rest of the context, or of the pool where that is smaller."""
    bounds = [limits.context - prompt] if limits.context is not None else []
    if limits.rank_capacity is not None:
        bounds.append(_output_that_fits_pool(shape, limits, limits.rank_capacity))
    return max(min(bounds), 0) if bounds else limits.unknown_output


def _output_that_fits_pool(shape: Shape, limits: Limits, capacity: int) -> int:
    """Largest output per sequence with which all sequences fit one rank's pool; 0: none would."""
    if len(shape.prompts) == 1:
        each = capacity // (limits.block * shape.n) * limits.block
        return max(each - shape.prompts[0], 0)
    low, high = 0, capacity
    while low < high:
        middle = (low + high + 1) // 2
        tokens = sum(round_up(p + middle, limits.block) for p in shape.prompts) * shape.n
        low, high = (middle, high) if tokens <= capacity else (low, middle - 1)
    return low


def claim(shape: Shape, limits: Limits) -> Claim:
    """Worst-case KV tokens of ``shape``; never less than its prompts, where those were counted.

    A prompt that was only bounded claims no more than the context: the engine refuses what is longer.
    Otherwise a long text that nobody counted would be told for ever to come back later.
    """
    prompts, block, n = shape.prompts, limits.block, shape.n
    if not shape.exact and limits.context is not None:
        prompts = tuple([min(prompt, limits.context) for prompt in prompts])
    if len(prompts) == 1:  # nearly all
        output = allowed_output(shape, prompts[0], limits)
        outputs: tuple[int, ...] = (output,)
        tokens = -(-(prompts[0] + output) // block) * block
    else:
        outputs = tuple([allowed_output(shape, prompt, limits) for prompt in prompts])
        tokens = sum([round_up(p + m, block) for p, m in zip(prompts, outputs, strict=True)])
    prefixes = shape.prefixes if len(shape.prefixes) == len(prompts) else ()
    return Claim(prompts, outputs, n, block, tokens * n, len(prompts) * n, prefixes)


def never_fits(shape: Shape, limits: Limits) -> NeverFits | None:
    """The proof that no state of the engine could ever serve ``shape``, or None."""
    if not shape.exact or _surely_fits(shape, limits):
        return None
    proofs = [proof for rule in _RULES if (proof := rule(shape, limits)) is not None]
    # name the tightest limit: a caller who obeys another one is refused again
    return min(proofs, key=lambda proof: proof.limit_tokens) if proofs else None


def _surely_fits(shape: Shape, limits: Limits) -> bool:
    """Whether all that it may come to is within every limit: true of nearly all. False: not known."""
    asked = shape.asked_output
    prompt = shape.prompts[0] if len(shape.prompts) == 1 else max(shape.prompts)
    if asked is None and not limits.ends_in_pool:
        return False
    return prompt + (asked or 1) <= limits.least


def _beyond_context(shape: Shape, limits: Limits) -> NeverFits | None:
    """The engine refuses a prompt that leaves no room to generate, and a limit above the context alone."""
    context, prompt, asked = limits.context, max(shape.prompts), shape.asked_output
    if context is None:
        return None
    room_needed = 0 if asked == 0 else 1  # asked 0 is scoring: the prompt may fill the context
    needed = prompt + room_needed
    if asked is not None and (asked > context or not limits.clamps_output):
        needed = prompt + asked
    if needed <= context:
        return None
    return _proof(RejectReason.CONTEXT, shape, needed, context, limits)


def _beyond_max_context(shape: Shape, limits: Limits) -> NeverFits | None:
    """The operator's own cap, to which no engine clamps: what the engine would allow counts in full."""
    if limits.max_context is None:
        return None
    prompt, asked = max(shape.prompts), shape.asked_output
    needed = prompt + (1 if asked is None else allowed_output(shape, prompt, limits))
    if needed <= limits.max_context:
        return None
    return _proof(RejectReason.MAX_CONTEXT, shape, needed, limits.max_context, limits)


def _beyond_capacity(shape: Shape, limits: Limits) -> NeverFits | None:
    """One sequence alone is beyond the pool. Several together prove nothing: the engine runs them in turn."""
    if limits.rank_capacity is None or not limits.capacity_exact:
        return None
    prompt = max(shape.prompts)
    unlimited = shape.asked_output is None and shape.default_output is None
    output = max(allowed_output(shape, prompt, limits), 1 if unlimited else 0)
    needed = round_up(prompt + output, limits.block)
    if needed <= limits.rank_capacity:
        return None
    return _proof(RejectReason.CAPACITY, shape, needed, limits.rank_capacity, limits)


_RULES = (_beyond_context, _beyond_max_context, _beyond_capacity)


def _proof(reason: RejectReason, shape: Shape, needed: int, limit: int, limits: Limits) -> NeverFits:
    prompt = max(shape.prompts)
    room = [c - prompt for c in (limits.context, limits.max_context) if c is not None]
    if limits.rank_capacity is not None and limits.capacity_exact:
        room.append(limits.rank_capacity // limits.block * limits.block - prompt)
    return NeverFits(
        reason=reason,
        prompt_tokens=prompt,
        needed_tokens=needed,
        limit_tokens=limit,
        largest_output=max(min(room), 0),
    )
