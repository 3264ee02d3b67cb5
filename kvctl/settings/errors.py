"""The error of settings that cannot be used."""

from collections.abc import Iterable


class SettingsError(ValueError):
    """``problems`` holds every fault found: where it is, what it is, and what to do."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
