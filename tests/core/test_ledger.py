"""Law 1: one lease, ended once; empty is exactly zero."""

import pytest

from kvctl.core.claim import Limits, claim
from kvctl.core.ledger import Lease, Ledger, LedgerError
from kvctl.core.outcomes import EndReason
from tests.core.conversation import shape

LIMITS = Limits(context=8192, block=64)


def lease(name: str, prompt: int = 60, output: int = 100, n: int = 1) -> Lease:
    asked = claim(shape(prompt, output, n=n), LIMITS)
    return Lease(id=name, key=("m", "chat", ""), claim=asked, streaming=True, admitted_at=0.0)


@pytest.mark.parametrize("reason", list(EndReason))
def test_every_way_out_leaves_the_ledger_at_exactly_zero(reason: EndReason) -> None:
    ledger = Ledger()
    for i in range(50):
        ledger.open(lease(f"r{i}", 7 * i, 13 * i, 1 + i % 3))
    for i in range(50):
        one = ledger.get(f"r{i}")
        assert one is not None
        one.output_tokens += i * 0.1
        ledger.end(f"r{i}", reason, 1.0)
    assert (len(ledger), ledger.claimed_tokens, ledger.held_tokens()) == (0, 0, 0)


def test_a_lease_is_opened_once_and_ended_once() -> None:
    ledger = Ledger()
    ledger.open(lease("a"))
    with pytest.raises(LedgerError, match="open already"):
        ledger.open(lease("a"))
    assert ledger.claimed_tokens == 192
    ledger.end("a", EndReason.CLIENT_GONE, 1.0)
    with pytest.raises(LedgerError, match="not open"):
        ledger.end("a", EndReason.FINISHED, 2.0)
    assert ledger.claimed_tokens == 0


def test_what_is_held_grows_by_whole_blocks_and_never_past_the_claim() -> None:
    """E18: 60 prompt tokens in blocks of 64 hold one block from admission, two from the fifth token on."""
    one = lease("a", 60, 100)
    held = []
    for output in (0, 4, 5, 68, 69, 100, 5000):
        one.output_tokens = output
        held.append(one.held_tokens())
    assert held == [64, 64, 128, 128, 192, 192, 192]
    assert held[-1] == one.claim.tokens


def test_output_is_shared_out_over_the_sequences() -> None:
    one = lease("a", 60, 100, n=4)
    one.output_tokens = 4 * 5 + 3
    assert one.output_per_sequence == 5
    assert one.held_tokens() == 4 * 128


def test_the_engines_own_count_replaces_what_was_seen() -> None:
    """A34: hidden thinking counts: the engine's completion_tokens stand, not what was visible."""
    ledger = Ledger()
    ledger.open(lease("a"))
    seen = ledger.get("a")
    assert seen is not None
    seen.output_tokens = 17.5
    record = ledger.end("a", EndReason.FINISHED, 3.0, output_tokens=42, prompt_tokens=61)
    assert (record.output_tokens, record.prompt_tokens, record.at, record.held_tokens) == (42, 61, 3.0, 128)
    assert "a" not in ledger
    ledger.open(lease("b"))
    assert ledger.end("b", EndReason.FINISHED, 3.0).output_tokens == 0
