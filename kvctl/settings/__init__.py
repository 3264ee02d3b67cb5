"""Settings: a pydantic-settings model; ``load`` reads it from every place and says where each value is from.

What a name needs is imported when it is asked for: ``kvctl status`` must not wait for pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvctl.settings.errors import SettingsError
    from kvctl.settings.loading import load
    from kvctl.settings.model import SPECS, Layer, Origin, Settings, Spec
    from kvctl.settings.units import Address
    from kvctl.settings.usual import socket_of

__all__ = ["SPECS", "Address", "Layer", "Origin", "Settings", "SettingsError", "Spec", "load", "socket_of"]

_HOMES = {"Address": "units", "SettingsError": "errors", "load": "loading", "socket_of": "usual"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'model')}"), name)
