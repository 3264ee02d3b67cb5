"""What images, audio and video are bounded by, and what the model's own folder says of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvctl.tokens.bound import json_bound
from kvctl.tokens.load import load_counter
from kvctl.tokens.media import MediaBounds, bound_of_all, without_media
from kvctl.tokens.media_config import image_tokens, media_bounds
from tests.tokens.tiny import write

Json = dict[str, Any]
QWEN: Json = {"max_pixels": 12_845_056, "min_pixels": 3136, "patch_size": 14, "merge_size": 2}
QWEN_3: Json = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "merge_size": 2,
}
PIXTRAL: Json = {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}}
MISTRAL_3: Json = {"size": {"longest_edge": 1540}, "patch_size": 14}
LLAVA: Json = {"crop_size": {"height": 336, "width": 336}}
CLIP: Json = {"vision_config": {"image_size": 336, "patch_size": 14}}
PINPOINTS: Json = {"image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]}
INTERN: Json = {
    "force_image_size": 448,
    "max_dynamic_patch": 12,
    "downsample_ratio": 0.5,
    "vision_config": {"patch_size": 14},
}


@pytest.mark.parametrize(
    ("preprocessor", "config", "least", "most"),
    [
        (QWEN, {}, 16_384, 17_000),
        (QWEN_3, {}, 16_384, 17_000),
        (PIXTRAL, {}, 64 * 65, 4400),
        (MISTRAL_3, {"spatial_merge_size": 2}, 55 * 56, 3250),
        (LLAVA, CLIP, 576, 620 * 2),
        (LLAVA, CLIP | PINPOINTS, 576 * 5, 3100),
        ({}, INTERN, 256 * 13, 3500),
        ({}, {"mm_tokens_per_image": 256}, 256, 300),
    ],
)
def test_families_that_say_how_large_a_picture_may_become(
    preprocessor: Json, config: Json, least: int, most: int
) -> None:
    tokens = image_tokens(preprocessor, config)
    assert tokens is not None
    assert least <= tokens <= most


@pytest.mark.parametrize(
    ("preprocessor", "config"),
    [
        ({}, {}),
        ({"max_pixels": -5, "patch_size": 14, "merge_size": 2}, {}),
        ({"max_pixels": "x", "size": 7}, {"vision_config": []}),
        ({"size": {"longest_edge": 1024}, "patch_size": {}}, {"image_grid_pinpoints": [1, [2]]}),
        ({}, {"max_dynamic_patch": 12}),
    ],
)
def test_files_that_do_not_say_it(preprocessor: Json, config: Json) -> None:
    assert image_tokens(preprocessor, config) is None


def test_the_folder_the_setting_and_the_default(tmp_path: Path) -> None:
    """What the operator set goes over the folder, and that over the default."""
    assert media_bounds(tmp_path, {}) == MediaBounds()
    (tmp_path / "preprocessor_config.json").write_text("[]")
    assert media_bounds(tmp_path, {}) == MediaBounds()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(MISTRAL_3))
    found = media_bounds(tmp_path / "tokenizer.json", {"video": 9000, "image": None})
    assert (found.video, found.audio) == (9000, MediaBounds().audio)
    assert 10_000 < found.image < 13_000
    assert media_bounds(tmp_path, {"image": 77}).image == 77


async def test_a_chat_is_bounded_by_it(tmp_path: Path) -> None:
    """One picture beside the text: its bound, whatever its base64 weighs; no proof of anything."""
    folder = write(tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN | {"max_pixels": 784_000}))
    counter = load_counter(str(folder))
    words: Json = {"type": "text", "text": "hi"}
    picture: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    plain = await counter.count_chat("m", {"messages": [{"role": "user", "content": [words]}]}, 100)
    body = {"messages": [{"role": "user", "content": [words, picture, picture]}]}
    count = await counter.count_chat("m", body, 2_000_000)
    assert not count.exact
    assert 2000 < count.prompts[0] - plain.prompts[0] < 2200
    await counter.close()
    given = load_counter("bound", media_tokens={"image": 50})
    assert given.media.image == 50


def test_bounds_by_kind_and_size() -> None:
    bounds = MediaBounds()
    minutes = {"type": "input_audio", "input_audio": {"data": "A" * 10_000_000, "format": "wav"}}
    assert bounds.of(minutes, "audio") == 100_000
    assert (
        bounds.of_parts([{"type": "text", "text": "x" * 999}, {"type": "video_url", "video_url": {}}])
        == 32_768
    )
    assert bounds.of_parts("x") == 0
    assert bounds.of_items([["a", "b"], None, {"format": "x"}], "image") == 3 * 16_384
    assert bounds.of_items("A" * 5120, "embeds") == 10
    assert bounds.of_items(None, "image") == 0


def test_bodies_of_any_form_hold_media_at_their_bound() -> None:
    part = {"type": "image", "source": {"data": "A" * 500_000}}
    body = {"x": [{"deep": [part, {"type": "text", "text": "hi"}]}], "n": 3}
    assert 16_384 < bound_of_all(body, MediaBounds()) < 16_600
    words = {"a": ["b", {"c": 1.5}], "d": None}
    assert bound_of_all(words, MediaBounds()) >= json_bound(words) - 2
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    assert bound_of_all({"x": nested}, MediaBounds()) > 100_000


def test_messages_without_media_are_left_as_they_are() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert without_media(body, MediaBounds()) == (body, 0)
    assert without_media({"messages": 7}, MediaBounds()) == ({"messages": 7}, 0)
