from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.sim import text

MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool", "odd"]), "content": st.text()}),
    min_size=1,
    max_size=4,
)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_text_survives_its_tokens(said: str) -> None:
    tokens = text.encode(said)
    assert text.decode(tokens) == said
    assert text.count(said) == len(tokens)


@given(MESSAGES, st.booleans(), st.booleans())
def test_chat_is_counted_without_being_rendered(
    messages: list[dict[str, Any]], tools: bool, generate: bool
) -> None:
    body = {"messages": messages, "add_generation_prompt": generate, "tools": [{"a": "b"}] if tools else None}
    assert text.count_chat(body) == len(text.render_chat(body))


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text.chat_text({"role": "user", "content": parts}) == "ab"
    with pytest.raises(ValueError, match="text"):
        text.chat_text({"role": "user", "content": [{"type": "image_url"}]})


def test_generated_words_count_as_one_token_each() -> None:
    answer = "".join(text.word(position) for position in range(50))
    assert text.count(answer) == 50
