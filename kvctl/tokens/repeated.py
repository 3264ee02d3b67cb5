"""A cache of the counts of whole chats, keyed by all that a count depends on.

A caller that was told to come back sends the same request again, and probes and batches repeat theirs: for
those neither the template nor the tokenizer is asked a second time. Only short chats are cached (of long ones
the parts are, see ``tokens.segments``), as hashes, and up to a maximum.
"""

import marshal
import threading
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from kvctl.tokens.source import View

MOST_ENTRIES = 2048
MOST_BYTES = 8192  # of a chat, as it is hashed
_FORM = 2  # marshal version: equal values give equal bytes, whatever else refers to them

CHAT_KEYS = (
    *("messages", "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""All of a chat body that a local count depends on."""
_ABSENT = (Ellipsis,) * len(CHAT_KEYS)  # differs from null


def chat_key(body: Mapping[str, Any], view: View) -> bytes | None:
    """The key of all that decides the count; None: too long, or not plain data."""
    shown = (view.context, view.begins, list(map(body.get, CHAT_KEYS, _ABSENT)))
    try:
        written = marshal.dumps(shown, _FORM)
    except ValueError:
        return None
    return blake2b(written, digest_size=16).digest() if len(written) <= MOST_BYTES else None


class Repeated:
    """The counts of the last chats. Thread-safe."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self._most = most_entries
        self._kept: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: bytes) -> tuple[int, int] | None:
        """The count and the characters of the prompt; None: not cached."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def keep(self, key: bytes, count: int, characters: int) -> None:
        """Remember a count."""
        with self._lock:
            self._kept[key] = (count, characters)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
