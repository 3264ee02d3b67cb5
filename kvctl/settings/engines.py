"""``[[engines]]``: several engines behind one daemon, each with what it does not share with the others.

An entry has ``name`` and ``url``, may have ``models`` and ``aliases``, and may set any of ``OWN_KEYS`` for
itself; what it does not set is the top level's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvctl.settings.tables import named_table, read_tables, show_tables

OWN_KEYS = (
    "engine",
    "engine_api_key",
    "engine_ca",
    "engine_client_certificate",
    "engine_client_key",
    "engine_server_name",
    "engine_verify",
    "engine_drain_on_abort",
    "gpus",
    "tokenizer",
    "plan_model",
    "plan_flags",
    "margin",
    "max_context",
    "capacity_tokens",
    "capacity_force",
    "fallback_budget_tokens",
    "max_num_seqs",
    "max_logprobs",
    "rank_pinning",
    "prefix_sharing",
)
_IDENTITY = ("name", "url", "models", "aliases")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine of several. ``own`` are its values of ``OWN_KEYS``, in base units.

    ``models`` are the names that it serves; empty: as it says itself. ``aliases`` lead from a name that
    callers may use to the one that the engine knows.
    """

    name: str
    url: str
    models: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)


def read_entries(given: object) -> object:
    """The entries of a TOML array of tables, or of the same as JSON text. Raises ValueError."""
    return read_tables(given, "engines", EngineEntry, _entry)


def show_entries(entries: Sequence[EngineEntry]) -> str:
    """JSON text that reads back as the same entries; empty where there are none."""
    return show_tables(entries, as_plain)


def as_plain(entry: EngineEntry) -> dict[str, Any]:
    """An entry as it might be written."""
    from kvctl.settings.model import SPECS  # noqa: PLC0415 - the model has entries in it

    own = {key: SPECS[key].show(value) for key, value in entry.own.items()}
    named = {
        "name": entry.name,
        "url": entry.url,
        "models": list(entry.models),
        "aliases": dict(entry.aliases),
    }
    return {key: value for key, value in named.items() if value} | own


def first_url(given: object) -> str | None:
    """The address of the first entry; None where there is none, or nothing readable."""
    try:
        entries = read_entries(given)
    except ValueError:
        return None
    return entries[0].url if isinstance(entries, tuple) and entries else None


def _entry(given: object, at: int) -> EngineEntry:
    raw, name, where = named_table(given, at, what="engine", keys="name and url")
    try:
        return EngineEntry(
            name=name,
            url=_value("engine_url", raw.get("url"), "url"),
            models=_names(raw.get("models", ()), "models"),
            aliases=_aliases(raw.get("aliases", {})),
            own={key: _value(key, value, key) for key, value in raw.items() if _is_own(key)},
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_own(key: str) -> bool:
    if key in _IDENTITY:
        return False
    if key not in OWN_KEYS:
        raise ValueError(
            f"{key} cannot be set for one engine; it may have {', '.join((*_IDENTITY, *OWN_KEYS))}"
        )
    return True


def _value(key: str, raw: object, shown: str) -> Any:
    from kvctl.settings.model import SPECS  # noqa: PLC0415 - the model has entries in it

    if raw is None:
        raise ValueError(f"{shown} is missing")
    try:
        return SPECS[key].judge(raw)
    except ValueError as error:
        value = "a secret" if SPECS[key].secret else repr(raw)
        raise ValueError(f"{shown} = {value} {error}") from None


def _names(raw: object, shown: str) -> tuple[str, ...]:
    names = [raw] if isinstance(raw, str) else raw
    if not isinstance(names, Sequence) or not all(isinstance(each, str) and each.strip() for each in names):
        raise ValueError(f"{shown} = {raw!r} is no list of names")
    return tuple(dict.fromkeys(names))


def _aliases(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping) or not all(
        isinstance(each, str) and each for pair in raw.items() for each in pair
    ):
        raise ValueError(f"aliases = {raw!r} is no table of names, such as {{ gpt-4o = 'llama-3-8b' }}")
    return dict(raw)


def clashes(entries: Sequence[EngineEntry], engine_url: str) -> Iterator[str]:
    """What is wrong between the entries, one sentence each."""
    for name, times in Counter(each.name for each in entries).items():
        if times > 1:
            yield f"has the name {name!r} {times} times; give each engine its own"
    for url, times in Counter(each.url for each in entries).items():
        if times > 1:
            names = " and ".join(each.name for each in entries if each.url == url)
            yield f"has {url} as {names}: an engine must have one gate; name it once, with models and aliases"
    if entries and engine_url not in {each.url for each in entries}:
        yield f"does not hold engine_url ({engine_url}); where there are [[engines]], leave engine_url out"
    yield from _alias_clashes(entries)


def _alias_clashes(entries: Sequence[EngineEntry]) -> Iterator[str]:
    for each in entries:
        for alias, model in each.aliases.items():
            if each.models and model not in each.models:
                yield f"has the alias {alias!r} of {each.name} for {model!r}, which is not among its models"
            if alias == model:
                yield f"has the alias {alias!r} of {each.name} for itself; leave it out"
            owner = next((other for other in entries if alias in other.models), None)
            if owner is not None and alias != model:
                yield f"has the alias {alias!r} of {each.name}, which {owner.name} serves as its own model"
