"""The error of settings that cannot be used."""

from collections.abc import Iterable


class SettingsError(ValueError):
    """``problems`` holds every fault found: where it is, what it is, and what to do.

    ``usage``: one of them is a flag's, whoever gave the command can mend it.
    """

    def __init__(self, problems: Iterable[str], *, usage: bool = False) -> None:
        self.problems = tuple(problems)
        self.usage = usage
        super().__init__("\n".join(self.problems))
