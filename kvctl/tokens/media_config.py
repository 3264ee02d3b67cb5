"""Bounds of media parts from the model's own folder: ``preprocessor_config.json`` and ``config.json``.

A vision model's preprocessor says how large a picture may become and how many pixels make a token. The rules
below cover the families that say it in one of these ways; for the rest the defaults of ``MediaBounds`` stay.
A few tokens are added for markers that stand around a picture and for the ends of its rows.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvctl.tokens.media import MediaBounds

Config = Mapping[str, Any]

_MARKERS = 16
_SHARE_OF_ROWS = 32  # one token more in 32: row ends of the narrowest grids in use


def media_bounds(folder: Path, tokens: Mapping[str, int | None]) -> MediaBounds:
    """The bounds for a model folder (or a file in it). ``tokens``: by kind, what the operator set instead."""
    if not folder.is_dir():
        folder = folder.parent
    bounds = MediaBounds()
    preprocessor, config = _read(folder / "preprocessor_config.json"), _read(folder / "config.json")
    if (image := image_tokens(preprocessor, config)) is not None:
        bounds = replace(bounds, image=image)
    given = {kind: number for kind, number in tokens.items() if number is not None}
    return replace(bounds, **given)


def image_tokens(preprocessor: Config, config: Config) -> int | None:
    """Most tokens of one image; None: the files do not say."""
    for rule in (_fixed, _tiles, _pixel_budget, _patches_of_longest_edge, _one_crop):
        found = rule(preprocessor, config)
        if found is not None:
            return found + found // _SHARE_OF_ROWS + _MARKERS
    return None


def _fixed(preprocessor: Config, config: Config) -> int | None:
    """Gemma 3 and others: the same number for every image."""
    del preprocessor
    return _number(config.get("mm_tokens_per_image"))


def _tiles(preprocessor: Config, config: Config) -> int | None:
    """InternVL: tiles of a fixed size, and a thumbnail."""
    del preprocessor
    most, size = _number(config.get("max_dynamic_patch")), _number(config.get("force_image_size"))
    patch = _number(_inner(config, "vision_config").get("patch_size"))
    if most is None or size is None or patch is None:
        return None
    ratio = config.get("downsample_ratio", 0.5)
    side = size / patch * (ratio if isinstance(ratio, float) and 0 < ratio <= 1 else 1)
    return int(side * side + 0.5) * (most + 1)


def _pixel_budget(preprocessor: Config, config: Config) -> int | None:
    """Qwen2-VL and its successors: a maximum of pixels, in merged squares of patches."""
    del config
    pixels = _number(preprocessor.get("max_pixels")) or _number(
        _inner(preprocessor, "size").get("longest_edge")
    )
    patch, merge = _number(preprocessor.get("patch_size")), _number(preprocessor.get("merge_size"))
    if pixels is None or patch is None or merge is None:
        return None
    return -(-pixels // (patch * merge) ** 2)


def _patches_of_longest_edge(preprocessor: Config, config: Config) -> int | None:
    """Pixtral and Mistral 3: a square of the longest edge, in merged patches, with an end to each row."""
    edge = _number(_inner(preprocessor, "size").get("longest_edge"))
    patch = preprocessor.get("patch_size")
    side = _number(patch.get("height") if isinstance(patch, Mapping) else patch)
    if edge is None or side is None:
        return None
    merge = _number(config.get("spatial_merge_size")) or 1
    rows = -(-edge // (side * merge))
    return rows * (rows + 1)


def _one_crop(preprocessor: Config, config: Config) -> int | None:
    """LLaVA: a crop of fixed size in patches, and with pinpoints up to as many crops more as they allow."""
    vision = _inner(config, "vision_config")
    size, patch = _number(vision.get("image_size")), _number(vision.get("patch_size"))
    if size is None or patch is None or not preprocessor:
        return None
    one = (size // patch) ** 2 + 1
    points = config.get("image_grid_pinpoints")
    edges = [point for point in points if _is_pair(point)] if isinstance(points, list) else []
    crops = max((-(-a // size) * -(-b // size) for a, b in edges), default=0)
    return one * (crops + 1)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)


def _inner(config: Config, key: str) -> Config:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 < value < 1 << 40 else None


def _read(path: Path) -> Config:
    """A JSON object; empty where none can be read, so that the defaults apply."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
