"""Defaults < file < environment < credentials < flags, read and judged."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvctl.settings.errors import SettingsError
from kvctl.settings.model import AT_ODDS, SPECS, Layer, Settings
from kvctl.settings.sources import (
    Place,
    from_credentials,
    from_environment,
    from_file,
    from_flags,
    from_home,
    nearest,
)
from kvctl.settings.types import HIDDEN
from kvctl.settings.usual import CONFIG_VARIABLE, DEFAULT_CONFIG, MANUAL

_NO_FLAGS: Mapping[str, object] = MappingProxyType({})


def load(config: Path | None, env: Mapping[str, str], flags: Mapping[str, object] = _NO_FLAGS) -> Settings:
    """The settings in force. ``config`` None: $KVCTL_CONFIG, else the default file where there is one.

    ``flags`` maps keys to values as given. Raises SettingsError with every fault found.
    """
    named = config or (Path(env[CONFIG_VARIABLE]) if env.get(CONFIG_VARIABLE) else None)
    places = [
        from_home(env),
        from_file(named or DEFAULT_CONFIG, must_exist=named is not None),
        from_environment(env),
        from_credentials(env.get("CREDENTIALS_DIRECTORY")),
        from_flags(flags),
    ]
    states = {place.layer: place.state() for place in places}
    found = {place.layer: (*place.problems, *_misfits(place, states[place.layer])) for place in places}
    if problems := [each for place in found.values() for each in place]:
        raise SettingsError(problems, usage=bool(found[Layer.FLAG]))
    owners = {key: place for place in places for key in states[place.layer]}
    try:
        settings = Settings(**{key: states[place.layer][key] for key, place in owners.items()})
    except ValidationError as error:
        at_odds = [str(each["loc"][0]) for each in error.errors()]
        usage = any(key in owners and owners[key].layer is Layer.FLAG for key in at_odds)
        raise SettingsError((_at_large(each, owners) for each in error.errors()), usage=usage) from None
    settings._origins = {key: place.origin(key) for key, place in owners.items()}  # noqa: SLF001
    return settings


def _misfits(place: Place, state: Mapping[str, Any]) -> list[str]:
    """What the model says to one place alone: a bad file is bad all the same where a flag hides it."""
    if not state:
        return []
    try:
        Settings(**state)
    except ValidationError as error:
        told = [
            _told(place, state, each) for each in error.errors() if each["type"] not in ("missing", AT_ODDS)
        ]
        return list(dict.fromkeys(told))  # a list may have many bad items
    return []


def _told(place: Place, state: Mapping[str, Any], error: ErrorDetails) -> str:
    key = str(error["loc"][0])
    start = f"{place.where(key)}: {place.name(key)}"
    if error["type"] == "extra_forbidden":
        near = nearest(key)
        remedy = f"did you mean {place.name(near)}?" if near else f"see {MANUAL} for the names"
        return f"{start} is not a setting; {remedy}"
    if key == "engines":  # its own words name the entry and the value; the whole list may hold a key
        return f"{start}: {SPECS[key].complaint(error)}"
    shown = HIDDEN if SPECS[key].secret else repr(state[key])
    return f"{start} = {shown} {SPECS[key].complaint(error)}"


def _at_large(error: ErrorDetails, owners: Mapping[str, Place]) -> str:
    """What shows only in all places together."""
    key = str(error["loc"][0])
    if error["type"] == AT_ODDS:
        origin = owners[key].origin(key).where if key in owners else "settings"
        return f"{origin}: {key} {error['msg']}"
    variable = SPECS[key].variable
    return f"settings: {key} is not set; set {variable}=http://127.0.0.1:8000, say, or {key} in the file"
