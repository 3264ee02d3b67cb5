"""Request shape -> worst case. Each field case is named by its id."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.claim import _RULES, Limits, Shape, claim, never_fits, round_up
from kvctl.core.outcomes import RejectReason
from tests.core.conversation import shape
from tests.effort import examples

CONTEXT_8K = Limits(context=8192, rank_capacity=20_000, capacity_exact=True, block=16)


def test_chat_without_a_limit_claims_the_rest_of_the_context() -> None:
    """A01: chat without a limit is bounded by context - prompt, not by 0, 16 or the whole context."""
    claimed = claim(shape(100, None), CONTEXT_8K)
    assert claimed.outputs == (8092,)
    assert claimed.tokens == 8192


def test_completions_without_a_limit_claim_their_default_of_sixteen() -> None:
    """A01: the legacy route generates 16 tokens when no limit is sent."""
    assert claim(shape(100, None, default=16), CONTEXT_8K).tokens == round_up(116, 16)


def test_no_limit_and_a_pool_smaller_than_the_context_claims_the_pool_and_is_no_400() -> None:
    limits = Limits(context=262_144, rank_capacity=37_392, capacity_exact=True, block=16)
    assert never_fits(shape(1000, None), limits) is None
    assert claim(shape(1000, None), limits).tokens == 37_392


def test_no_limit_with_nothing_known_claims_the_stand_in() -> None:
    assert claim(shape(10, None), Limits(unknown_output=4096)).outputs == (4096,)


@pytest.mark.parametrize("asked", [8180, 8181, 8192])
def test_an_engine_that_clamps_gets_what_is_left_of_the_context(asked: int) -> None:
    """A03: 12 prompt tokens with max_tokens 8180 (exact fit), 8181 and 8192 are admitted at 8192."""
    assert never_fits(shape(12, asked), CONTEXT_8K) is None
    assert claim(shape(12, asked), CONTEXT_8K).tokens == 8192


def test_more_output_than_the_context_alone_is_refused_for_good() -> None:
    """A03: max_tokens above the context is a 400 whatever the engine does."""
    proof = never_fits(shape(12, 8193), CONTEXT_8K)
    assert proof is not None
    assert (proof.reason, proof.limit_tokens, proof.largest_output) == (RejectReason.CONTEXT, 8192, 8180)


def test_an_engine_that_does_not_clamp_refuses_one_token_too_many() -> None:
    """A03: up to vLLM 0.20, 12 + 8181 is a 400 and 12 + 8180 is not."""
    strict = Limits(context=8192, clamps_output=False)
    assert never_fits(shape(12, 8180), strict) is None
    proof = never_fits(shape(12, 8181), strict)
    assert proof is not None
    assert (proof.needed_tokens, proof.largest_output) == (8193, 8180)


def test_the_explicit_limit_is_claimed_whatever_the_model_ships_as_default() -> None:
    """A05: max_tokens 5000 claims 5000, though some engines cut it to the model's own 2048."""
    assert claim(shape(100, 5000, default=2048), CONTEXT_8K).outputs == (5000,)
    assert claim(shape(100, None, default=2048), CONTEXT_8K).outputs == (2048,)


def test_every_sequence_is_claimed() -> None:
    """A18: eight sequences (best_of 8, or n 8) of 100 + 60 tokens hold eight times their blocks."""
    claimed = claim(shape(100, 60, n=8), CONTEXT_8K)
    assert (claimed.sequences, claimed.tokens) == (8, 8 * 160)
    assert claim(shape([100, 33], 60, n=2), CONTEXT_8K).tokens == 2 * (160 + 96)


@pytest.mark.parametrize(("block", "each"), [(16, 80), (64, 128), (256, 256)])
def test_each_sequence_is_rounded_up_to_blocks(block: int, each: int) -> None:
    """E18: 65 tokens in blocks of 64 take 128, in blocks of 256 they take 256."""
    assert claim(shape(60, 5), Limits(context=8192, block=block)).tokens == each
    assert claim(shape([60] * 500, 5), Limits(context=8192, block=block)).tokens == 500 * each


def test_a_prompt_that_leaves_no_room_is_refused_for_good() -> None:
    assert never_fits(shape(8191, None), CONTEXT_8K) is None
    for prompt in (8192, 9000):
        proof = never_fits(shape(prompt, None), CONTEXT_8K)
        assert proof is not None
        assert (proof.reason, proof.largest_output) == (RejectReason.CONTEXT, 0)


def test_scoring_may_fill_the_context() -> None:
    assert never_fits(shape(8192, 0), CONTEXT_8K) is None
    assert never_fits(shape(8193, 0), CONTEXT_8K) is not None


def test_beyond_the_pool_names_both_numbers_and_what_would_fit() -> None:
    """E01: 60,000 prompt tokens against a pool of 37,392 and a context of 262,144."""
    limits = Limits(context=262_144, rank_capacity=37_392, capacity_exact=True, block=16)
    proof = never_fits(shape(60_000, 100), limits)
    assert proof is not None
    assert (proof.reason, proof.needed_tokens, proof.limit_tokens) == (RejectReason.CAPACITY, 60_112, 37_392)
    assert proof.largest_output == 0
    reachable = never_fits(shape(30_000, 50_000), limits)
    assert reachable is not None
    assert reachable.largest_output == 7_392
    assert never_fits(shape(30_000, reachable.largest_output), limits) is None
    assert never_fits(shape(30_000, reachable.largest_output + 1), limits) is not None


def test_many_sequences_together_beyond_the_pool_prove_nothing() -> None:
    """The engine runs them in turn, and shares their prompt where it can: law 4 asks for proof."""
    limits = Limits(context=32_768, rank_capacity=48_000, capacity_exact=True, block=16)
    assert never_fits(shape(10_000, 100, n=8), limits) is None
    assert never_fits(shape([1_000] * 100, 16), limits) is None
    assert claim(shape([1_000] * 100, 16), limits).largest_sequence == 1_024


@pytest.mark.parametrize(
    ("request_shape", "limits"),
    [
        (shape(60_000, 10, exact=False), Limits(context=8192, rank_capacity=100, capacity_exact=True)),
        (shape(60_000, 10), Limits(rank_capacity=37_392, capacity_exact=False)),
        (shape(60_000, 10), Limits()),
    ],
    ids=["bounded count", "uncertain capacity", "nothing known"],
)
def test_doubt_is_no_proof(request_shape: Shape, limits: Limits) -> None:
    """C04, C27: a count or a limit that is not certain never gives a 400."""
    assert never_fits(request_shape, limits) is None


def test_the_operators_cap_refuses_what_the_engine_would_let_grow_past_it() -> None:
    capped = Limits(context=32_768, max_context=8192)
    assert never_fits(shape(192, 8000), capped) is None
    proof = never_fits(shape(192, 8001), capped)
    assert proof is not None
    assert (proof.reason, proof.limit_tokens, proof.largest_output) == (RejectReason.MAX_CONTEXT, 8192, 8000)


def test_an_operators_cap_no_lower_than_the_context_changes_nothing() -> None:
    """A03: a client that asks for the whole context is clamped by the engine before any cap is passed."""
    assert never_fits(shape(12, 8192), Limits(context=8192, max_context=8192)) is None


@pytest.mark.parametrize(("prompts", "n"), [((), 1), ((-1,), 1), ((5,), 0)])
def test_nonsense_is_no_shape(prompts: tuple[int, ...], n: int) -> None:
    with pytest.raises(ValueError, match="not a request shape"):
        Shape(route="chat", model="m", prompts=prompts, n=n)


@settings(max_examples=examples(100), deadline=None)
@given(
    prompts=st.lists(st.integers(0, 40_000), min_size=1, max_size=4),
    n=st.integers(1, 4),
    outputs=st.tuples(st.none() | st.integers(0, 70_000), st.none() | st.just(16)),
    limits=st.builds(
        Limits,
        context=st.none() | st.integers(1, 40_000),
        rank_capacity=st.none() | st.integers(1, 60_000),
        capacity_exact=st.just(True),
        block=st.sampled_from([1, 16, 64, 256]),
    ),
)
def test_a_claim_covers_what_the_engine_may_hold(
    prompts: list[int], n: int, outputs: tuple[int | None, int | None], limits: Limits
) -> None:
    asked, default = outputs
    request, context = shape(prompts, asked, n=n, default=default), limits.context
    claimed = claim(request, limits)
    assert claimed.tokens % limits.block == 0
    assert claimed.tokens >= sum(prompts) * n
    assert claimed.largest_sequence * claimed.sequences >= claimed.tokens
    for prompt, output in zip(claimed.prompts, claimed.outputs, strict=True):
        assert context is None or prompt + output <= max(context, prompt)
        if asked is not None and (context is None or prompt + asked <= context):
            assert output == asked
    proof = never_fits(request, limits)
    if proof is not None:
        assert proof.needed_tokens > proof.limit_tokens
        if proof.largest_output > 0:
            assert never_fits(shape(prompts, proof.largest_output, n=n), limits) is None


@settings(max_examples=examples(400), deadline=None)
@given(
    prompts=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    outputs=st.tuples(st.none() | st.integers(0, 120), st.none() | st.just(16)),
    limits=st.builds(
        Limits,
        context=st.none() | st.integers(1, 100),
        max_context=st.none() | st.integers(1, 100),
        rank_capacity=st.none() | st.integers(1, 100),
        capacity_exact=st.booleans(),
        clamps_output=st.booleans(),
        block=st.sampled_from([1, 16]),
    ),
)
def test_what_is_let_by_in_a_few_comparisons_breaks_no_rule(
    prompts: list[int], outputs: tuple[int | None, int | None], limits: Limits
) -> None:
    request = shape(prompts, outputs[0], default=outputs[1])
    broken = any(rule(request, limits) is not None for rule in _RULES)
    assert (never_fits(request, limits) is not None) == broken


@settings(max_examples=examples(200), deadline=None)
@given(
    prompts=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    n=st.integers(1, 4),
    capacity=st.integers(1, 2000),
    block=st.sampled_from([1, 16, 48]),
)
def test_without_any_limit_a_request_may_just_fill_the_pool(
    prompts: list[int], n: int, capacity: int, block: int
) -> None:
    output = claim(shape(prompts, None, n=n), Limits(rank_capacity=capacity, block=block)).outputs[0]

    def fits(output: int) -> bool:
        return n * sum(round_up(prompt + output, block) for prompt in prompts) <= capacity

    assert output == 0 or fits(output)
    assert not fits(output + 1)


def test_a_prompt_that_was_only_bounded_claims_the_context_at_most() -> None:
    """60 MB that nobody counted must not wait for ever for room that cannot come: the engine judges it."""
    assert claim(shape(60_000_000, 16, exact=False), CONTEXT_8K).tokens == 8192
    assert claim(shape(5_000, 16, exact=False), CONTEXT_8K).tokens == round_up(5_016, 16)
    assert claim(shape(60_000, 16, exact=False), Limits()).tokens == round_up(60_016, 16)
