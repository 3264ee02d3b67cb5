"""The settings as a JSON document: what ``show-config`` prints and the admin API answers."""

from pathlib import Path
from typing import Any

from kvctl.settings.model import SPECS, Settings
from kvctl.settings.units import Address


def as_document(settings: Settings) -> dict[str, Any]:
    """Each setting's value in base units, as an operator would write it, and where it came from."""
    shown = {}
    for key, spec in SPECS.items():
        value, origin = getattr(settings, spec.attribute), settings.origin(key)
        plain = str(value) if isinstance(value, Address | Path) else value
        shown[key] = {
            "value": list(plain) if isinstance(plain, tuple) else plain,
            "text": settings.shown(key),
            "origin": origin.layer.value,
            "where": origin.where,
        }
    return {"settings": shown}
