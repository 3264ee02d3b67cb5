"""Makes the counter that the setting ``tokenizer`` asks for."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import Ask, EngineCounter
from kvctl.tokens.files import TokenizerError, load_files
from kvctl.tokens.isolated import IsolatedCounter
from kvctl.tokens.local import LocalCounter
from kvctl.tokens.media import MediaBounds
from kvctl.tokens.media_config import media_bounds
from kvctl.tokens.source import Source

ENGINE = "engine"
BOUND = "bound"


def load_counter(
    setting: str,
    *,
    ask: Ask | None = None,
    inline_bytes: int = 2048,
    workers: int = 2,
    timeout_s: float = 5.0,
    media_tokens: Mapping[str, int | None] = MappingProxyType({}),
    isolated: bool = False,
) -> ChainCounter:
    """The counter for ``setting``: a path (local, then engine, then bound), ``engine`` or ``bound``.

    ``media_tokens``: bounds of media parts by kind (``image`` ...), in place of what the model's folder
    tells. ``ask`` reaches the engine's /tokenize; None: the engine is not asked. ``isolated``: the local
    tokenizer runs in a process of its own. Reads files, which takes up to seconds for a large vocabulary:
    call it before the loop serves, or in a thread. Raises TokenizerError.
    """
    sources: list[Source] = []
    given = {kind: number for kind, number in media_tokens.items() if number is not None}
    media = MediaBounds(**given)
    if setting not in (ENGINE, BOUND):
        try:
            path = Path(setting).expanduser()
        except RuntimeError:
            text = f"tokenizer {setting!r}: this user has no home; write the whole path"
            raise TokenizerError(text) from None
        media = media_bounds(path, media_tokens)
        if isolated:
            sources.append(IsolatedCounter(path, workers=workers, timeout_s=timeout_s))
        else:
            files = load_files(path)
            own = LocalCounter(files, inline_bytes=inline_bytes, workers=workers, timeout_s=timeout_s)
            sources.append(own)
    if setting != BOUND and ask is not None:
        sources.append(EngineCounter(ask, timeout_s=timeout_s))
    return ChainCounter(sources, media=media)
