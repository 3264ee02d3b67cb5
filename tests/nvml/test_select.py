import pytest
from pydantic import TypeAdapter

from kvctl.gpu.select import Card, CardState, Kind, Selector, SelectorError, parse_selector, select
from kvctl.settings.types import Gpus

FIRST = Card(index=0, uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", pci="00000000:3b:00.0")
SECOND = Card(index=1, uuid="GPU-8932aaaa-0000-0000-0000-000000000000", pci="00000001:af:00.0")
PARENT = "GPU-cccccccc-0000-0000-0000-000000000000"
SLICES = tuple(
    Card(index=2, uuid=f"MIG-{n}{n}{n}{n}-0000", pci="00000000:c1:00.0", parent_uuid=PARENT) for n in (1, 2)
)
CARDS = (FIRST, SECOND, *SLICES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", Selector(Kind.ALL, "all")),
        (" ALL ", Selector(Kind.ALL, "all")),
        ("07", Selector(Kind.INDEX, "7")),
        ("00", Selector(Kind.INDEX, "0")),
        ("GPU-8932F937", Selector(Kind.UUID, "gpu-8932f937")),
        ("MIG-GPU-8932f937/7/0", Selector(Kind.UUID, "mig-gpu-8932f937/7/0")),
        ("3B:00.0", Selector(Kind.PCI, "00000000:3b:00.0")),
        ("0001:af:00", Selector(Kind.PCI, "00000001:af:00.0")),
        ("00000001:AF:00.0", Selector(Kind.PCI, "00000001:af:00.0")),
    ],
)
def test_forms(text: str, expected: Selector) -> None:
    """D09: cards are named by UUID, PCI id or MIG UUID as well as by index."""
    assert parse_selector(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "H200", "GPU-", "1.5", "3b:00.9", "all,0", "/dev/nvidia0"])
def test_other_text_is_refused_and_told_the_forms(text: str) -> None:
    with pytest.raises(SelectorError, match=r"UUID .* or a PCI id"):
        parse_selector(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", CARDS),
        ("1", (SECOND,)),
        ("GPU-8932f", (FIRST,)),
        (SECOND.uuid.upper(), (SECOND,)),
        ("af:00.0", ()),  # another domain
        ("0001:af:00.0", (SECOND,)),
        ("2", SLICES),  # a partitioned card means its instances
        ("GPU-cccc", SLICES),
        ("MIG-2222", SLICES[1:]),
        ("9", ()),
    ],
)
def test_selection(text: str, expected: tuple[Card, ...]) -> None:
    assert select([parse_selector(text)], CARDS).cards == expected


def test_a_short_uuid_that_fits_two_cards_chooses_none() -> None:
    selection = select([parse_selector("GPU-8932")], CARDS)
    assert selection.cards == ()
    assert selection.missing == ("gpu-8932",)


def test_each_card_once_in_the_order_asked() -> None:
    selection = select([parse_selector(text) for text in ("1", "all", "0", "7")], CARDS)
    assert selection.cards == (SECOND, FIRST, *SLICES)
    assert selection.missing == ("7",)


def test_a_lost_card_is_still_chosen_by_index() -> None:
    gone = Card(index=3, uuid="", state=CardState.LOST)
    assert select([parse_selector("3")], (*CARDS, gone)).cards == (gone,)
    assert select([parse_selector("GPU-0")], (*CARDS, gone)).cards == ()


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "12345",
        "GPU-8932f937",
        "gpu-89",
        "MIG-GPU-8932f937/7/0",
        "3b:00",
        "00003:3B:00.0",
        "GPU-" + 90 * "a",
    ],
)
def test_what_the_settings_let_through_is_a_selector(text: str) -> None:
    assert parse_selector(*TypeAdapter(Gpus).validate_python([text])).text
