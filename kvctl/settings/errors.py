"""The error of settings that cannot be used."""

import re
from collections.abc import Iterable

_WORD = r"[\w.-]*(?:key|token|secret|password|auth)[\w.-]*"
_SECRETS = (
    (re.compile(r"""(?<=://)[^/@\s'"]+(?=@)"""), "***"),  # user and password of an address
    (re.compile(rf"""(?<=[?&])({_WORD}=)[^&\s'"]+""", re.IGNORECASE), r"\1***"),  # what its query calls so
    (
        re.compile(rf"""(['"]{_WORD}['"]: ?)('[^']*'|"[^"]*"|\[[^\]]*\])""", re.IGNORECASE),
        r"\1***",
    ),  # of a table
)


class SettingsError(ValueError):
    """``problems`` holds every fault found: where it is, what it is, and what to do.

    No secrets are in them: they are logged, and shown to whoever asks for the status.
    ``usage``: one of them is a flag's, whoever gave the command can mend it.
    """

    def __init__(self, problems: Iterable[str], *, usage: bool = False) -> None:
        self.problems = tuple(map(_without_secrets, problems))
        self.usage = usage
        super().__init__("\n".join(self.problems))


def _without_secrets(problem: str) -> str:
    for pattern, masked in _SECRETS:
        problem = pattern.sub(masked, problem)
    return problem
