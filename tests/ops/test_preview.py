"""The picture of the first row: well-formed, and of the figures that it was given."""

from pathlib import Path
from xml.etree import ElementTree as ET

from grafana import generate
from grafana.panels_overview import OVERVIEW
from grafana.preview import Line, picture
from grafana.rules import Query

PICTURE = Path(generate.__file__).parents[1] / "docs" / "pictures" / "overview.svg"


def texts(svg: str) -> list[str]:
    root = ET.fromstring(svg)  # noqa: S314 - our own
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def constant(query: Query) -> list[Line]:
    return [Line(query.legend, ((0.0, 0.125), (1.0, 0.125)))]


def test_every_panel_of_the_row_is_in_it() -> None:
    shown = texts(picture(constant))
    assert {panel.title for panel in OVERVIEW[0].panels} <= set(shown)
    assert "12.5%" in shown  # the margin, in its unit


def test_without_data_it_says_so() -> None:
    shown = texts(picture(lambda _: []))
    assert "no data" in shown
    assert "none refused" in shown


def test_legends_are_text() -> None:
    shown = texts(picture(lambda _: [Line("<b>&", ((0.5, 1.0),))]))
    assert "<b>&" in shown


def test_the_stored_picture_is_of_this_row() -> None:
    assert {panel.title for panel in OVERVIEW[0].panels} <= set(texts(PICTURE.read_text()))
