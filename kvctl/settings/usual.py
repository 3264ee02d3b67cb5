"""Where things usually are, for commands that must not wait for pydantic."""

from collections.abc import Mapping
from pathlib import Path

from kvctl.settings import toml
from kvctl.settings.units import socket_path

DEFAULT_CONFIG = Path("/etc/kvctl/kvctl.toml")
CONFIG_VARIABLE = "KVCTL_CONFIG"  # names the file, so it is no setting of its own
ADMIN_SOCKET = Path("/run/kvctl/kvctl.sock")


def socket_of(env: Mapping[str, str]) -> Path:
    """The admin socket by file or default, for commands; a file that is no good is the daemon's matter."""
    document, *_ = toml.read(Path(env.get(CONFIG_VARIABLE) or DEFAULT_CONFIG))
    try:
        return socket_path(Path(document["admin_socket"]))
    except (KeyError, TypeError, ValueError):
        return ADMIN_SOCKET
