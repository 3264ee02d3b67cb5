from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.tokens.bound import SPECIALS_PER_TEXT, chat_bound, json_bound, text_bound
from kvctl.tokens.media import MediaBounds, without_media
from tests.effort import examples
from tests.tokens.tiny import train

TOKENIZER = train()


@given(st.text())
@settings(max_examples=examples(200), deadline=None)
def test_no_text_has_more_tokens_than_its_bound(text: str) -> None:
    assert len(TOKENIZER.encode(text)) <= text_bound(text) + SPECIALS_PER_TEXT


@pytest.mark.parametrize(
    ("text", "least"),
    [("", 0), ("abc", 3), ("é", 2), ("\ud800", 3), ("\ufdfa" * 10, 330), ("x" * 300_000 + "é", 300_002)],
)
def test_text_bound(text: str, least: int) -> None:
    assert text_bound(text) >= least


def test_deep_nesting_is_walked_without_recursion() -> None:
    value: Any = "x"
    for _ in range(100_000):
        value = [value]
    assert json_bound(value) > 100_000


def test_a_chat_counts_all_that_a_template_may_print() -> None:
    body = {
        "messages": [{"role": "user", "content": "x" * 1000}],
        "tools": [{"d": "y" * 500}],
        "user": "z" * 9000,
    }
    assert 1500 < chat_bound(body) < 4000
    assert chat_bound({"messages": None}) > 0


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "ok"}]}


BASE64 = "data:image/png;base64," + "A" * 2_000_000


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"type": "image_url", "image_url": {"url": BASE64}}, 16_384),
        ({"image_url": BASE64}, 16_384),
        ({"type": "image_url", "image_url": {"url": BASE64}, "uuid": "u"}, 16_384),
        ({"type": "video_url", "video_url": {"url": "http://x/v.mp4"}}, 32_768),
        ({"type": "input_audio", "input_audio": {"data": "A" * 4_000_000, "format": "wav"}}, 40_000),
        ({"type": "audio_url", "audio_url": {"url": "http://x/a.mp3"}}, 16_384),
        ({"type": "image_embeds", "image_embeds": "A" * 51_200}, 100),
    ],
)
def test_media_count_by_their_kind(part: dict[str, Any], tokens: int) -> None:
    text = {"type": "text", "text": "look"}
    body, bound = without_media(parts(text, part), MediaBounds())
    assert bound == tokens
    assert body["messages"][0]["content"] == [text]
    assert body["messages"][1] == {"role": "assistant", "content": "ok"}


@pytest.mark.parametrize(
    "body",
    [
        parts({"type": "text", "text": "a"}),
        {"messages": "x"},
        {"messages": [None, 3, {"content": [None, 7, "x"]}]},
        {},
    ],
)
def test_bodies_without_media_stay_as_they_are(body: dict[str, Any]) -> None:
    assert without_media(body, MediaBounds()) == (body, 0)
