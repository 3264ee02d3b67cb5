"""The setting ``tokenizer`` -> a counter."""

from pathlib import Path

from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.engine import Ask, EngineCounter
from kvctl.tokens.files import load_files
from kvctl.tokens.local import LocalCounter
from kvctl.tokens.media import MediaBounds
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
    media: MediaBounds | None = None,
) -> ChainCounter:
    """The counter for ``setting``: a path (local, then engine, then bound), ``engine`` or ``bound``.

    ``ask`` reaches the engine's /tokenize; None: the engine is not asked. Reads files, which takes up to
    seconds for a large vocabulary: call it before the loop serves, or in a thread. Raises TokenizerError.
    """
    sources: list[Source] = []
    if setting not in (ENGINE, BOUND):
        files = load_files(Path(setting).expanduser())
        sources.append(LocalCounter(files, inline_bytes=inline_bytes, workers=workers, timeout_s=timeout_s))
    if setting != BOUND and ask is not None:
        sources.append(EngineCounter(ask, timeout_s=timeout_s))
    return ChainCounter(sources, media=media or MediaBounds())
