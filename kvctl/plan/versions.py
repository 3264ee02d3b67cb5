"""Engine versions, and what changed in which.

Versions are read generously, since people write what they see: ``0.20.1.dev0+g10158``, ``v0.11.2``,
``>=0.28``, ``~0.19``. A version that cannot be placed counts as the newest, with an assumption in the plan
that says so.
"""

import re
from dataclasses import dataclass
from functools import total_ordering

NEWEST = "0.32.0"
_NUMBER = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_EARLY = re.compile(r"(?:rc|dev|a|b)\d", re.IGNORECASE)
_MONTH = re.compile(r"(20\d\d)-(0[1-9]|1[0-2])(?!\d)")
_FIRST_ENGINE = re.compile(r"\bV0\b")
# First release of the month's vLLM, for logs that give a date instead of a version.
_CALENDAR = (
    (2024, 9, (0, 6, 0)), (2025, 1, (0, 7, 0)), (2025, 3, (0, 8, 0)), (2025, 5, (0, 9, 0)), (2025, 8, (0,
    10, 0)),
    (2025, 10, (0, 11, 0)), (2025, 12, (0, 12, 0)), (2026, 1, (0, 14, 0)), (2026, 2, (0, 15, 0)),
    (2026, 3, (0, 17, 0)), (2026, 4, (0, 19, 0)), (2026, 5, (0, 20, 0)), (2026, 6, (0, 22, 0)),
    (2026, 8, (0, 26, 0)), (2026, 10, (0, 29, 0)), (2026, 11, (0, 32, 0)),
)  # fmt: skip


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """A release, comparable. ``final`` is False before the release (dev, rc); ``known``: it was read."""

    release: tuple[int, int, int]
    final: bool = True
    known: bool = True

    def __lt__(self, other: "Version") -> bool:
        return (self.release, self.final) < (other.release, other.final)

    def since(self, major: int, minor: int, patch: int = 0) -> bool:
        """Whether this release has what came with that one."""
        return self >= Version((major, minor, patch))

    def __str__(self) -> str:
        return ".".join(str(part) for part in self.release) + ("" if self.final else " (before its release)")


def parse_version(text: str | None) -> Version:
    """The version in ``text``; the newest one, ``known=False``, where there is none to be read."""
    newest = Version((0, 32, 0), known=False)
    if text is None:
        return newest
    dated = _MONTH.search(text)
    if dated is not None:
        return _by_month(int(dated[1]), int(dated[2])) or newest
    found = _NUMBER.search(text)
    if found is None:
        return Version((0, 6, 0)) if _FIRST_ENGINE.search(text) else newest
    release = (int(found[1]), int(found[2]), int(found[3] or 0))
    if release[0] == 0 and 0 < release[1] <= 1 and _EARLY.search(text):
        return newest  # 0.1.dev<N>: a build without tags, whose number says nothing
    return Version(release, final=not _EARLY.search(text[found.end() :]))


def _by_month(year: int, month: int) -> Version | None:
    fitting = [
        release
        for since_year, since_month, release in _CALENDAR
        if (since_year, since_month) <= (year, month)
    ]
    return Version(fitting[-1]) if fitting else None
