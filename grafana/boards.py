"""The dashboards."""

from dataclasses import dataclass

from grafana.panels_admission import ADMISSION
from grafana.panels_engine import ENGINE
from grafana.panels_overview import OVERVIEW
from grafana.rules import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard; ``uid`` is its file's name and stays."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]


BOARDS = (
    Board(
        uid="kvctl-overview",
        title="kvctl: overview",
        about="KV budget against forecast and usage, and what the gate did with it.",
        rows=OVERVIEW,
    ),
    Board(
        uid="kvctl-admission",
        title="kvctl: admission",
        about="Why requests are refused, and whether that is right.",
        rows=ADMISSION,
    ),
    Board(
        uid="kvctl-engine",
        title="kvctl: engine and cards",
        about="The engine and its cards, as kvctl sees them.",
        rows=ENGINE,
    ),
)
