"""Where things usually are, for commands that must not wait for pydantic."""

import os
from collections.abc import Mapping
from pathlib import Path

from kvctl.settings import toml
from kvctl.settings.units import socket_path

DEFAULT_CONFIG = Path("/etc/kvctl/kvctl.toml")
CONFIG_VARIABLE = "KVCTL_CONFIG"  # names the file, so it is no setting of its own
ADMIN_SOCKET = Path("/run/kvctl/kvctl.sock")
STATE_DIR = Path("/var/lib/kvctl")
MANUAL = "configuration.md (in docs or /usr/share/doc/kvctl)"  # in a clone; where install-units puts it


def own_socket(env: Mapping[str, str]) -> Path:
    """Where the socket is of a daemon that an ordinary user runs by hand."""
    return Path(env.get("XDG_RUNTIME_DIR") or f"/tmp/kvctl-{os.getuid()}") / "kvctl" / ADMIN_SOCKET.name  # noqa: S108


def own_state(env: Mapping[str, str]) -> Path | None:
    """Where the state is of such a daemon; None: nowhere, its user has no home (in a container, say)."""
    if given := env.get("XDG_STATE_HOME"):
        return Path(given) / "kvctl"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".local" / "state" / "kvctl" if home.is_absolute() else None


def writable(folder: Path) -> bool:
    """Whether the folder is there for this user, or could be made."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path("/"))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def homely(env: Mapping[str, str]) -> dict[str, str]:
    """Defaults of an ordinary user, who may write to none of the service's places; empty for the service."""
    found = {}
    if not writable(ADMIN_SOCKET.parent):
        found["admin_socket"] = str(own_socket(env))
    if not writable(STATE_DIR) and (own := own_state(env)) is not None:
        found["state_dir"] = str(own)
    return found


def faults_of_file(env: Mapping[str, str]) -> list[str]:
    """Why commands cannot read the settings file; empty where they can, or there need be none."""
    named = env.get(CONFIG_VARIABLE)
    return toml.read(Path(named or DEFAULT_CONFIG), must_exist=bool(named))[2]


def socket_of(env: Mapping[str, str]) -> Path:
    """The admin socket by file or default, for commands; a file that is no good is the daemon's matter."""
    document, *_ = toml.read(Path(env.get(CONFIG_VARIABLE) or DEFAULT_CONFIG))
    try:
        return socket_path(Path(document["admin_socket"]))
    except (KeyError, TypeError, ValueError):
        own = own_socket(env)
        return own if own.exists() and not ADMIN_SOCKET.exists() else ADMIN_SOCKET
