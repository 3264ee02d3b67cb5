"""What of the settings this machine does not live up to. Blocks; for check-config and the start.

Law 8: degraded is a state, not an exit. None of these keeps the daemon from starting; each has its remedy.
"""

import os
from collections.abc import Iterator

from kvctl.settings.model import Settings
from kvctl.settings.usual import writable


def warnings(settings: Settings) -> Iterator[str]:
    """One sentence for each, for the user that this process runs as."""
    if not writable(settings.state_dir):
        yield f"state_dir {settings.state_dir} cannot be written: overrides would not outlive a restart"
    if not writable(settings.admin_socket.parent):
        yield f"admin_socket {settings.admin_socket}: its folder cannot be written, so no command would work"
    if settings.tokenizer not in ("engine", "bound") and not os.access(settings.tokenizer, os.R_OK):
        yield f"tokenizer {settings.tokenizer} cannot be read: prompts would be bounded by their bytes"
