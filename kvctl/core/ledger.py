"""Leases: what admitted requests hold, from admission to their end.

What several leases share (``prefixes``) is in the sums once; a single lease counts all that it reads.

Law 1: one lease, ended once. ``Ledger.end`` is the only way out of the ledger, and a second end of the
same lease raises. When nothing runs, every sum below is exactly zero (they are sums of integers).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvctl.core.claim import Claim, round_up
from kvctl.core.outcomes import EndReason
from kvctl.core.prefixes import Changes, Prefixes
from kvctl.core.records import record


@dataclass(slots=True, eq=False)
class Lease:
    """One admitted request.

    ``output_tokens`` counts over all sequences; ``streaming`` leases are updated with their tokens, the
    others advance at the engine's measured decode rate.
    """

    id: str
    key: tuple[str, ...]  # class of the request: model, route, tenant
    claim: Claim
    streaming: bool
    admitted_at: float
    cached_tokens: int = 0  # prompt tokens that the engine had computed for others when it was admitted
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_tokens: float = 0.0  # a float, since events are scaled by the tokens that each stands for

    @property
    def output_per_sequence(self) -> int:
        """Output so far of the average sequence, rounded down."""
        return int(self.output_tokens / self.claim.sequences)

    @property
    def longest(self) -> int:
        """Output that its longest sequence may make."""
        outputs = self.claim.outputs
        return outputs[0] if len(outputs) == 1 else max(outputs)

    @property
    def prefilling(self) -> bool:
        """True until the first token was seen."""
        return self.first_token_at is None

    def held_tokens(self) -> int:
        """KV tokens held now: prompts and output so far, in whole blocks, prompts from admission on."""
        claim = self.claim
        if len(claim.prompts) == 1:  # nearly all, and a tick asks every lease: written out
            n, most, block = claim.n, claim.outputs[0], claim.block
            done = int(self.output_tokens) if n == 1 else int(self.output_tokens / n)
            held = claim.prompts[0] + min(done, most)
            return -(-held // block) * block * n
        done = self.output_per_sequence
        pairs = zip(claim.prompts, claim.outputs, strict=True)
        return sum([round_up(p + min(done, m), claim.block) for p, m in pairs]) * claim.n


@record
class EndedLease:
    """The record of a lease that ended, for survival, the drain rate, metrics and logs."""

    lease: Lease
    reason: EndReason
    at: float
    held_tokens: int
    output_tokens: int
    prompt_tokens: int | None  # as the engine's usage said, None: it did not


class LedgerError(RuntimeError):
    """A lease was opened or ended twice: a defect of the caller."""


class Ledger:
    """All leases of one engine. ``sharing``: whether common prefixes are counted once."""

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self.sharing = False
        self.moved = Changes()  # by the last opening or end
        self.leases: dict[str, Lease] = {}  # the open ones, by id
        self._claimed = 0
        self.sequences = 0  # that the engine runs for all leases
        self.get = self.leases.get
        """The lease of an id while it is open, else None."""

    def __len__(self) -> int:
        return len(self.leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.leases.values())

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self.leases

    @property
    def claimed_tokens(self) -> int:
        """Sum of the worst cases of all leases, what they share once."""
        return self._claimed - self.prefixes.saved

    @property
    def shared_tokens(self) -> int:
        """KV tokens that the leases save by sharing."""
        return self.prefixes.saved

    def without_token(self) -> int:
        """Sequences of leases whose first token has not come."""
        return sum(lease.claim.sequences for lease in self if lease.prefilling)

    def held_tokens(self) -> int:
        """Sum of what the leases hold now, what they share once."""
        return sum([lease.held_tokens() for lease in self]) - self.prefixes.saved

    def share(self, *, sharing: bool) -> bool:
        """Count common prefixes once, or no longer; returns whether that is a change."""
        if sharing == self.sharing:
            return False
        self.sharing, self.prefixes = sharing, Prefixes()
        for lease in self if sharing else ():
            self.prefixes.open(lease.id, lease.key[0], lease.claim)
            if not lease.prefilling:
                self.prefixes.computed(lease.id, lease.claim)
        return True

    def open(self, lease: Lease) -> None:
        """Charge a lease. Raises LedgerError if its id is open already."""
        if lease.id in self.leases:
            raise LedgerError(f"lease {lease.id} is open already")
        self.leases[lease.id] = lease
        self._claimed += lease.claim.tokens
        self.sequences += lease.claim.sequences
        if self.sharing:
            self.moved = self.prefixes.open(lease.id, lease.key[0], lease.claim)

    def end(
        self,
        lease_id: str,
        reason: EndReason,
        now: float,
        *,
        output_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> EndedLease:
        """Take a lease off. ``output_tokens`` is the engine's own count where its usage said so.

        Raises LedgerError if no lease of that id is open.
        """
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            raise LedgerError(f"lease {lease_id} is not open")
        self._claimed -= lease.claim.tokens
        self.sequences -= lease.claim.sequences
        if output_tokens is not None:
            lease.output_tokens = output_tokens
        if self.sharing:
            self.moved = self.prefixes.end(lease_id, lease.claim)
        return EndedLease(lease, reason, now, lease.held_tokens(), int(lease.output_tokens), prompt_tokens)
