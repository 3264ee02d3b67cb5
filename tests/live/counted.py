"""What kvctl counts for a body: with an operator's cap, a refusal tells.

With a cap of ``LIMIT`` tokens and an output limit of as many, every prompt is refused and the refusal names
the largest output that would fit: the cap less the prompt.
"""

import re
from typing import Any

from tests.live.daemon import Daemon
from tests.live.wire import post

LIMIT = 4096

Body = dict[str, Any]


def kvctls_count(daemon: Daemon, path: str, body: Body) -> int | str:
    """Prompt tokens as kvctl counts them, or what it answered instead."""
    answer = post(daemon.base_url + path, body)
    found = re.search(rb"=(\d+) with this prompt", answer.body) if answer.status == 400 else None
    return LIMIT - int(found[1]) if found else f"{answer.status} {answer.body[:300]!r}"


def differences(pairs: list[tuple[Body, int | str, int | str]]) -> list[str]:
    """A line for each body whose two counts differ."""
    return [f"{own} is not {true}: {str(body)[:300]}" for body, own, true in pairs if own != true]
