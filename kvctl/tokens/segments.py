"""Caches the counts of a text's parts between special tokens, so that only a chat's new turn is tokenised.

Special tokens are taken out of the raw text before anything else happens to it. What follows such a token
goes through normaliser, pre-tokenizer and merges by itself. So the tokens of a text are the tokens of its
parts, one after the other, if each part but the first begins with such a token. That holds only for a token
that no other token of the vocabulary can hide, lengthen or overlap, and is tried out at load on texts that
would show it (``adds_up``): where it fails, nothing is cut and nothing is cached.

Long parts between special tokens are cut between words (``tokens.between_words``), if that adds up too.

The cache holds counts, and token ids where prefixes are wanted. It is bounded in entries and bytes, and its
keys are hashes, never text.
"""

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer

from kvctl.tokens.between_words import LONG, adds_up_between_words, parts
from kvctl.tokens.source import Tally

PART = 256  # least characters of a part: shorter ones are joined with what follows
MOST_CUTS = 32
ENTRY_BYTES = 200  # size of an entry without its ids
_PROBED = 8
_BORDERS = ("", "a", "The end. ", " \n\n", "\t x", "\u00e9\u6771", "\u2581_", "1,23", "'s", "\U0001f600")


class Part(NamedTuple):
    """The tokens of one part; ``ids`` (unsigned ints) where they were asked for."""

    tokens: int
    ids: "array[int] | None" = None


class Segments:
    """Counts texts by their parts. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: Iterable[str] = (),
        *,
        part: int = PART,
        most_entries: int = 65_536,
        most_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        """``words``: special tokens that prompts are expected to have, preferred as cuts; none: any."""
        self._tokenizer = tokenizer
        cuts = cutting_tokens(tokenizer, words)
        self.works = bool(cuts) and adds_up(tokenizer, cuts)
        self._cuts = _pattern(cuts) if self.works else None
        self._between_words = adds_up_between_words(tokenizer)
        self._frame = _frame(tokenizer)
        self._part_size = part
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._kept: OrderedDict[bytes, Part] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.tally = Tally()

    def count(self, text: str, *, add_special_tokens: bool, with_ids: bool) -> Part:
        """Tokens of ``text``. Raises whatever the tokenizer raises."""
        least = LONG if self._cuts is None else self._part_size
        if self._frame is None or len(text) < least:
            return self._encoded(text, add_special_tokens=add_special_tokens, with_ids=with_ids)
        head, tail = self._frame if add_special_tokens else ((), ())
        found = [self._part(piece, with_ids=with_ids) for piece in self._pieces(text)]
        count = sum([part.tokens for part in found]) + len(head) + len(tail)
        if not with_ids:
            return Part(count)
        ids = array("I", head)
        for part in found:
            ids.extend(part.ids or ())
        ids.extend(tail)
        return Part(count, ids)

    def _pieces(self, text: str) -> Iterator[str]:
        for piece in (text,) if self._cuts is None else pieces(text, self._cuts, self._part_size):
            if len(piece) > LONG and self._between_words:
                yield from parts(piece)
            else:
                yield piece

    def spare(self, characters: int) -> None:
        """Count a text of ``characters`` that was known as a whole."""
        with self._lock:
            self.tally.hits += 1
            self.tally.spared += characters

    def _part(self, piece: str, *, with_ids: bool) -> Part:
        key = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and (kept.ids is not None or not with_ids):
                self._kept.move_to_end(key)
                self.tally.hits += 1
                self.tally.spared += len(piece)
                return kept
        part = self._encoded(piece, add_special_tokens=False, with_ids=with_ids)
        with self._lock:
            self._keep(key, part)
        return part

    def _encoded(self, text: str, *, add_special_tokens: bool, with_ids: bool) -> Part:
        encoding = _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        with self._lock:
            self.tally.misses += 1
            self.tally.tokenised += len(text)
        return Part(len(encoding), array("I", encoding.ids) if with_ids else None)

    def _keep(self, key: bytes, part: Part) -> None:
        self._bytes += _size(part) - (_size(self._kept[key]) if key in self._kept else 0)
        self._kept[key] = part
        self._kept.move_to_end(key)
        while len(self._kept) > self._most_entries or self._bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)

    @property
    def size(self) -> tuple[int, int]:
        """Entries and bytes that are held."""
        return len(self._kept), self._bytes


def pieces(text: str, cuts: re.Pattern[str], least: int = PART) -> Iterator[str]:
    """``text`` in parts of ``least`` characters or more (the last may have less), cut before special tokens.

    Texts that begin alike have the same parts, except for the last one where they are still alike.
    """
    start = 0
    for found in cuts.finditer(text):
        if found.start() - start >= least:
            yield text[start : found.start()]
            start = found.start()
    yield text[start:]


def cutting_tokens(tokenizer: Tokenizer, words: Iterable[str] = ()) -> tuple[str, ...]:
    """Tokens before which a raw text may be cut, whatever stands around them; ``words`` first."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    texts = [token.content for token in added]
    wanted = set(words)
    named = [token for token in added if token.content in wanted]
    able = (token.content for token in named or added if _stands_alone(token, texts))
    return tuple(text for text, _ in zip(able, range(MOST_CUTS), strict=False))


def _stands_alone(token: AddedToken, texts: Sequence[str]) -> bool:
    """Whether the token is found wherever its text occurs."""
    text = token.content
    if token.lstrip or token.single_word or not text or text[0].isalnum() or text[0] == "_":
        return False
    return not any(
        text in other or _overlaps(other, text) or _overlaps(text, other) for other in texts if other != text
    ) and not _overlaps(text, text)


def _overlaps(before: str, after: str) -> bool:
    """Whether a proper end of ``before`` is a proper beginning of ``after``."""
    return any(after.startswith(before[-size:]) for size in range(1, min(len(before), len(after))))


def adds_up(tokenizer: Tokenizer, cuts: Sequence[str]) -> bool:
    """Whether parts have the tokens of the whole, on texts around ``cuts`` that would show a difference."""
    pattern = _pattern(cuts)
    for number, (before, after) in enumerate(product(_BORDERS, _BORDERS)):
        cut, second = cuts[number % len(cuts)], cuts[(number * 3 + 1) % len(cuts)]
        text = before + cut + after + second + before
        places = [0, *(found.start() for found in pattern.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(places)]
        joined = [token for part in parts for token in _ids(tokenizer, part)]
        if joined != _ids(tokenizer, text):
            return False
    return True


def _frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids that the tokenizer puts before and behind a text; None: not always the same."""
    found = {_around(tokenizer, text) for text in ("a", "b c", " d\n", "\u00e9 1", "x" * _PROBED)}
    return found.pop() if len(found) == 1 else None


def _around(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    bare, framed = _ids(tokenizer, text), _encode(tokenizer, text, add_special_tokens=True).ids
    more = len(framed) - len(bare)
    places = [start for start in range(more + 1) if framed[start : start + len(bare)] == bare]
    return (tuple(framed[: places[0]]), tuple(framed[places[0] + len(bare) :])) if places else None


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return _encode(tokenizer, text, add_special_tokens=False).ids


def _pattern(cuts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(cuts, key=len, reverse=True)))


def _size(part: Part) -> int:
    return ENTRY_BYTES + (0 if part.ids is None else len(part.ids) * part.ids.itemsize)
