"""``/v1/models`` of several engines as one list, aliases included.

A model that several engines serve is listed once, with the shortest of their contexts: that is what a caller
may count on. An alias is listed as the model that it leads to, with ``root`` naming it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.engines.series import json_object

Entry = dict[str, Any]
_CONTEXT = "max_model_len"


def merged(lists: Iterable[tuple[bytes, Mapping[str, str]]]) -> list[Entry]:
    """The entries of each engine's answer and its aliases (to the engine's own names), in that order."""
    found: dict[str, Entry] = {}
    for body, aliases in lists:
        own = {str(entry["id"]): entry for entry in _entries(body)}
        for entry in own.values():
            _add(found, entry)
        for alias, model in aliases.items():
            entry = own.get(model, {"object": "model", "owned_by": "kvctl"})
            _add(found, {**entry, "id": alias, "root": model, "parent": None})
    return list(found.values())


def _entries(body: bytes) -> list[Entry]:
    data = json_object(body).get("data")
    return (
        [each for each in data if isinstance(each, dict) and "id" in each] if isinstance(data, list) else []
    )


def _add(found: dict[str, Entry], entry: Entry) -> None:
    known = found.setdefault(str(entry["id"]), dict(entry))
    lengths = [each[_CONTEXT] for each in (known, entry) if isinstance(each.get(_CONTEXT), int)]
    if lengths:
        known[_CONTEXT] = min(lengths)


def model_list(entries: Iterable[Entry]) -> bytes:
    """The answer to ``GET /v1/models``."""
    return json.dumps({"object": "list", "data": list(entries)}).encode()


def one_model(entries: Iterable[Entry], model: str) -> bytes | None:
    """The answer to ``GET /v1/models/MODEL``; None: no engine serves it."""
    entry = next((each for each in entries if each["id"] == model), None)
    return None if entry is None else json.dumps(entry).encode()
