"""Requests that generate nothing: embeddings, scores, prompts that are only scored."""

from kvctl.core.claim import round_up
from kvctl.core.outcomes import EndReason
from tests.core.conversation import Conversation, shape


def test_they_hold_their_prompts_and_teach_nothing_of_answers() -> None:
    """A thousand embeddings leave the forecast of an answer where it was."""
    talk = Conversation().up()
    probe = talk.admit(shape(100, 4000))
    talk.tick()
    before = talk.status.forecast_peak_tokens
    talk.end(probe, EndReason.CLIENT_GONE)
    for _ in range(1000):
        done = talk.admit(shape(300, 0))
        assert talk.status.claimed_tokens == round_up(300, 16)
        talk.end(done, EndReason.FINISHED, 0)
    talk.admit(shape(100, 4000))
    talk.tick()
    assert talk.status.forecast_peak_tokens >= 0.9 * before
