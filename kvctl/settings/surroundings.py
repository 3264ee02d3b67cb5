"""What of the settings this machine does not live up to. Blocks; for check-config and the start.

Law 8: degraded is a state, not an exit. Without a writable folder the daemon starts and does without.
"""

import os
import resource
from collections.abc import Iterator

from kvctl.settings.model import Settings
from kvctl.settings.usual import writable

FEW_DESCRIPTORS = 4096  # each running request holds two


def warnings(settings: Settings) -> Iterator[str]:
    """One sentence for each, for the user that this process runs as."""
    if not writable(settings.state_dir):
        yield f"state_dir {settings.state_dir} cannot be written: overrides would not outlive a restart"
    if not writable(settings.admin_socket.parent):
        yield f"admin_socket {settings.admin_socket}: its folder cannot be written, so no command would work"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < FEW_DESCRIPTORS:
        remedy = "raise LimitNOFILE (ulimit -Hn)"
        yield f"descriptors: {most} at most, enough for about {most // 2} requests at once; {remedy}"
    if not settings.engine_verify:
        yield "engine_verify is false: whoever answers at the engine's address gets all prompts"
    for key in ("tls_key", "engine_client_key"):
        path = getattr(settings, key)
        if path is not None and path.exists() and path.stat().st_mode & 0o007:
            yield f"{key} {path} is open to every user of this machine: chmod o= it"
    if settings.plan_model is not None and not os.access(settings.plan_model, os.R_OK):
        remedy = "the pool is not planned; name the model's folder"
        yield f"plan_model {settings.plan_model} cannot be read: {remedy}"
