"""What a check of ``kvctl doctor`` finds."""

from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """``warn``: kvctl works, and less well; ``fail``: it does not, or decides on what is wrong."""

    PASS = "pass"  # noqa: S105 - a word, not one
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome; ``remedy`` is empty where nothing is amiss."""

    check: str
    mark: Mark
    text: str
    remedy: str = ""

    def document(self) -> dict[str, str]:
        """For JSON."""
        return {"check": self.check, "result": self.mark.value, "found": self.text, "remedy": self.remedy}


def passed(check: str, text: str) -> Finding:
    """Nothing amiss."""
    return Finding(check, Mark.PASS, text)


def warned(check: str, text: str, remedy: str) -> Finding:
    """Works, and less well."""
    return Finding(check, Mark.WARN, text, remedy)


def failed(check: str, text: str, remedy: str) -> Finding:
    """Does not work."""
    return Finding(check, Mark.FAIL, text, remedy)
