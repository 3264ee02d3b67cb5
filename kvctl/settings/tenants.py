"""``[[tenants]]``: whose requests are told apart, with the keys they come with and what each of them may.

Keys are written as their SHA-256, so that the file holds no secret: ``printf %s "$KEY" | sha256sum``.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.settings.tables import named_table, read_tables, show_tables

DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}")
_LIMITS = ("tokens_in_flight", "requests_per_minute", "tokens_per_minute")
_KEYS = ("name", "keys", "weight", "priority", *_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantEntry:
    """One tenant. ``keys`` are SHA-256 digests in hex; limits None: there is none.

    The one named ``default`` is everybody who is not named.
    """

    name: str
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    priority: bool = False
    tokens_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def read_tenants(given: object) -> object:
    """The entries of a TOML array of tables, or of the same as text. Raises ValueError."""
    return read_tables(given, "tenants", TenantEntry, _entry)


def show_tenants(entries: Sequence[TenantEntry]) -> str:
    """JSON text that reads back as the same entries; empty where there are none."""
    return show_tables(entries, as_plain)


def as_plain(entry: TenantEntry) -> dict[str, Any]:
    """An entry as it might be written."""
    values = {key: getattr(entry, key) for key in _KEYS} | {"keys": list(entry.keys)}
    return {key: value for key, value in values.items() if value not in (None, False, [])}


def clashes(entries: Sequence[TenantEntry]) -> Iterator[str]:
    """What must not be there twice."""
    for name, times in Counter(each.name for each in entries).items():
        if times > 1:
            yield f"names {name} {times} times"
    for key, times in Counter(key for each in entries for key in each.keys).items():
        if times > 1:
            yield f"gives the key {key[:8]}... to several tenants"


def _entry(given: object, at: int) -> TenantEntry:
    raw, name, where = named_table(given, at, what="tenant", keys="name")
    strangers = sorted(set(raw) - set(_KEYS))
    if strangers:
        raise ValueError(f"{where}: {strangers[0]} is not one of {', '.join(_KEYS)}")
    try:
        return TenantEntry(
            name=name,
            keys=_digests(raw.get("keys", ())),
            weight=_weight(raw.get("weight", 1.0)),
            priority=_switch(raw.get("priority", False)),
            **{key: _limit(key, raw[key]) for key in _LIMITS if raw.get(key) is not None},
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _digests(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError("keys must be a list")  # noqa: TRY004 - pydantic takes ValueErrors
    bad = [each for each in given if not isinstance(each, str) or not DIGEST.fullmatch(each)]
    if bad:
        raise ValueError('keys must be SHA-256 digests in hex: printf %s "$KEY" | sha256sum')
    return tuple(str(each).removeprefix("sha256:").lower() for each in given)


def _weight(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0.001 <= given <= 1000.0:
        raise ValueError("weight must be a number from 0.001 to 1000")
    return float(given)


def _switch(given: object) -> bool:
    if not isinstance(given, bool):
        raise ValueError("priority must be true or false")  # noqa: TRY004 - see above
    return given


def _limit(key: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{key} must be a whole number of at least 1")
    return given
