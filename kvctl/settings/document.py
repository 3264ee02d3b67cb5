"""The settings as a JSON document: what ``show-config`` prints and the admin API answers."""

from pathlib import Path
from typing import Any

from pydantic import SecretStr

from kvctl.settings.engines import EngineEntry, as_plain
from kvctl.settings.model import SPECS, Settings
from kvctl.settings.tenants import TenantEntry
from kvctl.settings.tenants import as_plain as tenant_as_plain
from kvctl.settings.units import Address


def as_document(settings: Settings) -> dict[str, Any]:
    """Each setting's value in base units, as an operator would write it, and where it came from."""
    shown = {}
    for key, spec in SPECS.items():
        value, origin = getattr(settings, spec.attribute), settings.origin(key)
        plain = str(value) if isinstance(value, Address | Path | SecretStr) else value
        shown[key] = {
            "value": [_plain(each) for each in plain] if isinstance(plain, tuple) else plain,
            "text": settings.shown(key),
            "origin": origin.layer.value,
            "where": origin.where,
            "live": spec.live,
        }
    return {"settings": shown}


def _plain(each: Any) -> Any:
    if isinstance(each, TenantEntry):
        return tenant_as_plain(each)
    return as_plain(each) if isinstance(each, EngineEntry) else each
