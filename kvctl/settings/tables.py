"""Settings that are an array of tables, ``[[engines]]`` or ``[[tenants]]``, or the same as text."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

E = TypeVar("E")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def read_tables(given: object, key: str, kind: type[E], make: Callable[[object, int], E]) -> object:
    """The entries of the setting ``key``: those that are of ``kind`` already, others by ``make``.

    ``make`` gets a table and its place, from 1. Raises ValueError.
    """
    tables = _from_text(given, key) if isinstance(given, str) else given
    if not isinstance(tables, Sequence):
        raise ValueError("is no array of tables")  # noqa: TRY004 - pydantic takes ValueErrors
    return tuple(each if isinstance(each, kind) else make(each, at) for at, each in enumerate(tables, 1))


def show_tables(entries: Sequence[E], as_plain: Callable[[E], Mapping[str, Any]]) -> str:
    """JSON text that reads back as the same entries; empty where there are none."""
    return json.dumps([as_plain(each) for each in entries]) if entries else ""


def named_table(raw: object, at: int, *, what: str, keys: str) -> tuple[Mapping[str, Any], str, str]:
    """(table, its name, how an error begins): ``what`` it is, ``keys`` that it needs. Raises ValueError."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"entry {at}: is no table with {keys}")  # noqa: TRY004 - see above
    name = raw.get("name")
    where = f"{what} {name!r}" if name else f"entry {at}"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}: name must be letters, digits, dots, dashes and underscores, at most 63 of them"
        )
    return raw, name, where


def _from_text(text: str, key: str) -> object:
    if not text.strip():
        return ()
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return tomllib.loads(f"{key} = {text}")[key]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is neither JSON nor TOML: {error}") from None
