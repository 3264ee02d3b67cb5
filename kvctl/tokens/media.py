"""Images, audio and video of a body: a bound per part, never their base64 as text and never 1.

How many tokens a picture takes depends on the model (a tile count, a pixel budget). Where the model's own
folder is at hand it tells (``tokens.media_config``); the defaults cover the largest budgets that common
models use unless configured otherwise (Qwen2.5-VL: 16,384 for an image, 24,576 for a video; Whisper-like
encoders: 25 tokens per second of audio). What a part adds is never proof of a 400.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.tokens.bound import SCALARS, TOKENS_PER_SCALAR, text_bound

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Content parts that are text to the engine."""

_KIND_OF_KEY = {
    "image_url": "image",
    "image_embeds": "embeds",
    "input_image": "image",
    "image_pil": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "embeds",
    "audio": "audio",
    "video_url": "video",
    "video_embeds": "embeds",
    "video": "video",
    "prompt_embeds": "embeds",
    "file": "image",
    "input_file": "image",
    "document": "image",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaBounds:
    """Most prompt tokens per media part."""

    image: int = 16_384
    video: int = 32_768
    audio: int = 16_384  # for a reference: some eleven minutes
    audio_bytes_per_token: int = 100  # inline: base64 of speech at 16 kbit/s, 25 tokens a second
    embeds_bytes_per_token: int = 512  # base64 of one row of 192 values in 16 bits, the narrowest in use

    def of(self, part: Mapping[str, Any], kind: str) -> int:
        """Bound of one part."""
        return self._sized(kind, _longest_text(part))

    def of_parts(self, parts: Any) -> int:
        """Bound of all media among content parts; texts add nothing."""
        kinds = [(part, _kind(part)) for part in parts] if isinstance(parts, list) else []
        return sum(self.of(part, kind) for part, kind in kinds if kind is not None)

    def of_items(self, items: Any, kind: str) -> int:
        """Bound of one medium or a list of them (of lists), as references or base64."""
        total, stack = 0, [items]
        while stack:
            item = stack.pop()
            if isinstance(item, list):
                stack.extend(item)
            elif item is not None:
                total += self._sized(kind, len(item) if isinstance(item, str) else 0)
        return total

    def _sized(self, kind: str, size: int) -> int:
        """The bound of a medium; ``size``: characters of the payload or of the reference to it."""
        if kind == "embeds":
            return max(1, -(-size // self.embeds_bytes_per_token))
        if kind == "audio":
            return max(self.audio, size // self.audio_bytes_per_token)
        return self.video if kind == "video" else self.image


def _longest_text(part: Mapping[str, Any]) -> int:
    """Length of the longest string in a part, two levels deep: the payload."""
    found, stack = 0, list(part.values())
    for value in stack:
        if isinstance(value, str):
            found = max(found, len(value))
        elif isinstance(value, Mapping):
            found = max(found, *(len(v) for v in value.values() if isinstance(v, str)), 0)
    return found


def _kind(part: Any) -> str | None:
    """The medium of a content part; None for text and for what the engine will refuse."""
    if not isinstance(part, Mapping):
        return None
    named = part.get("type")
    if isinstance(named, str) and named in TEXT_PARTS:
        return None
    if isinstance(named, str) and named in _KIND_OF_KEY:
        return _KIND_OF_KEY[named]
    return next((kind for key, kind in _KIND_OF_KEY.items() if key in part), None)


def without_media(body: Mapping[str, Any], bounds: MediaBounds) -> tuple[Mapping[str, Any], int]:
    """``body`` without its media parts, and the bound of their tokens. (body, 0) when there are none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not _any_parts(messages):
        return body, 0
    tokens, kept = 0, []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        kinds = [(part, _kind(part)) for part in content] if isinstance(content, list) else []
        media = [bounds.of(part, kind) for part, kind in kinds if kind is not None]
        tokens += sum(media)
        kept.append({**message, "content": [p for p, kind in kinds if kind is None]} if media else message)
    return ({**body, "messages": kept}, tokens) if tokens else (body, 0)


def _any_parts(messages: list[Any]) -> bool:
    """Whether the content of any message is a list: else all is text."""
    return list in [type(message.get("content")) for message in messages if isinstance(message, dict)]


def bound_of_all(body: Mapping[str, Any], bounds: MediaBounds) -> int:
    """Most tokens of all text in a body of any form, with media parts at their own bound.

    Iterative: nesting cannot exhaust the stack.
    """
    total, stack = 0, [*body.keys(), *body.values()]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += text_bound(item) + 2
        elif isinstance(item, Mapping):
            named = item.get("type")
            kind = _KIND_OF_KEY.get(named) if isinstance(named, str) else None
            if kind is not None:
                total += bounds.of(item, kind)
            else:
                total += 2
                stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            total += 2 + len(item)
            if SCALARS.issuperset(map(type, item)):
                total += TOKENS_PER_SCALAR * len(item)
            else:
                stack += item
        else:
            total += TOKENS_PER_SCALAR
    return total
