"""What a conformance case is, for the tables of cases and the suite that runs them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.core.outcomes import Absence

PAGES = Path(__file__).parent / "pages"


@dataclass(frozen=True)
class Case:
    """A page and what its ranks must read as. ``absent`` names all fields without a value."""

    engine: str
    page: str
    ranks: dict[str, dict[str, Any]]
    absent: dict[str, Absence] = field(default_factory=dict)
    absent_of: dict[str, dict[str, Absence]] = field(default_factory=dict)  # of single ranks, besides


def page(name: str) -> str:
    """A page of the folder ``pages``."""
    return (PAGES / name).read_text()
