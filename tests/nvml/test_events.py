"""What the driver tells of itself, through the real binding: kinds, cards, instances, and no way to tell."""

from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from kvctl.core.outcomes import Absence
from kvctl.gpu.binding import Code, Nvml
from kvctl.gpu.faults import CardEvent, EventKind, kind_of_xid, meaning, table
from kvctl.gpu.select import parse_selector
from kvctl.gpu.session import NvmlSession
from tests.nvml.conftest import Install
from tests.nvml.fake_library import FakeCard, FakeEvent, FakeLibrary, cards

SINGLE, DOUBLE, XID = 1, 2, 8


def session() -> NvmlSession:
    return NvmlSession(Nvml(pynvml), [parse_selector("all")], lambda: 100.0)


def told(library: FakeLibrary, *events: FakeEvent) -> tuple[CardEvent, ...]:
    reader = session()
    reader.read()
    library.events += events
    return reader.wait(0) or ()


@pytest.mark.parametrize(
    ("xid", "kind"),
    [
        *[(xid, EventKind.XID_FATAL) for xid in (46, 48, 62, 64, 74, 79, 94, 95, 119, 120, 140)],
        *[(xid, EventKind.XID_APPLICATION) for xid in (13, 31, 43, 45, 68, 109)],
        *[(xid, EventKind.XID_OTHER) for xid in (63, 92, 154, 7, 999)],
    ],
)
def test_an_xid_has_a_kind_and_a_meaning(install: Install, xid: int, kind: EventKind) -> None:
    library = install(*cards(2))
    (event,) = told(library, FakeEvent(1, XID, xid))
    assert event == CardEvent(uuids=(library.cards[1].uuid,), kind=kind, xid=xid)
    assert event.fatal == (kind is EventKind.XID_FATAL)
    assert f"Xid {xid}, {meaning(xid)}" in event.sentence


def test_every_xid_of_the_table_is_of_one_kind() -> None:
    assert all(kind is kind_of_xid(xid) and words for xid, kind, words in table())
    assert len({xid for xid, _, _ in table()}) == len(table())


def test_memory_errors(install: Install) -> None:
    library = install(*cards(1))
    events = told(library, FakeEvent(0, SINGLE, 0), FakeEvent(0, DOUBLE, 0))
    assert [(event.kind, event.fatal) for event in events] == [
        (EventKind.ECC_CORRECTED, False),
        (EventKind.ECC_UNCORRECTED, True),
    ]
    assert "uncorrectable memory error" in events[1].sentence


def test_an_instance_is_told_apart(install: Install) -> None:
    """D07: an error of one instance leaves the others of its card alone; one of the card concerns all."""
    parts = {0: FakeCard("MIG-a", gpu_instance=3), 2: FakeCard("MIG-b", gpu_instance=5)}
    library = install(replace(cards(1)[0], mig=1, instances=parts))
    one, whole = told(library, FakeEvent(0, XID, 94, instance=5), FakeEvent(0, XID, 95))
    assert one.uuids == ("MIG-b",)
    assert whole.uuids == ("MIG-a", "MIG-b")
    assert library.registered == [1]  # once a card, not once an instance


def test_a_card_that_the_driver_does_not_name(install: Install) -> None:
    library = install(*cards(1))
    (event,) = told(library, FakeEvent(7, XID, 79))
    assert event.uuids == ()
    assert "does not name" in event.sentence


@pytest.mark.parametrize(
    ("name", "code", "absence"),
    [
        ("nvmlDeviceRegisterEvents", Code.NOT_SUPPORTED, Absence.NOT_SUPPORTED),
        ("nvmlDeviceGetSupportedEventTypes", Code.NO_PERMISSION, Absence.NO_PERMISSION),
        ("nvmlEventSetCreate", Code.UNKNOWN, Absence.FAILED),
    ],
)
def test_events_that_cannot_be_had_are_absent(
    install: Install, name: str, code: Code, absence: Absence
) -> None:
    library = install(*cards(1))
    library.errors[name] = code
    reader = session()
    (sample,) = reader.read().samples
    assert sample.absent == {"events": absence}
    assert reader.wait(0) is None


def test_a_driver_without_the_functions(install: Install) -> None:
    library = install(*cards(1))
    library.without |= {"nvmlEventSetCreate", "nvmlDeviceGetComputeRunningProcesses_v3"}
    (sample,) = session().read().samples
    assert sample.absent == {"events": Absence.NOT_SUPPORTED, "processes": Absence.NOT_SUPPORTED}


def test_a_wait_that_fails_is_taken_up_again_without_the_lost_card(install: Install) -> None:
    """D12: the set breaks when one card is lost; the others' events go on."""
    library = install(*cards(2))
    reader = session()
    reader.read()
    library.errors["nvmlEventSetWait_v2"] = Code.GPU_IS_LOST
    assert reader.wait(0) == ()
    assert reader.wait(0) is None  # and does not spin until the next reading
    library.errors.clear()
    library.cards[0].errors["nvmlDeviceGetSupportedEventTypes"] = Code.GPU_IS_LOST
    first, second = reader.read().samples
    assert first.absent["events"] is Absence.LOST
    assert "events" not in second.absent
    library.events.append(FakeEvent(1, XID, 79))
    events = reader.wait(0)
    assert events is not None
    assert [event.uuids for event in events] == [(library.cards[1].uuid,)]
    library.cards[0].errors.clear()
    assert not any(sample.absent for sample in reader.read().samples), "it is back, and so are its events"


def test_everything_is_given_back(install: Install) -> None:
    """D16: the event set as well."""
    library = install(*cards(1))
    reader = session()
    reader.read()
    assert library.event_sets == 1
    reader.close()
    assert library.event_sets == 0
    assert reader.wait(0) is None


def test_processes_and_what_they_hold(install: Install) -> None:
    """D18: what a process holds may be unknown; it is never a number then, and nothing is summed."""
    library = install(*cards(2))
    library.cards[0].processes = {17: 1 << 30, 18: None, 19: (1 << 64) - 2}
    library.cards[1].errors["nvmlDeviceGetComputeRunningProcesses_v3"] = Code.NO_PERMISSION
    reading = session().read()
    found = {each.pid: each.used_bytes for each in reading.processes[library.cards[0].uuid]}
    assert found == {17: 1 << 30, 18: None, 19: None}
    assert library.cards[1].uuid not in reading.processes
    assert reading.samples[1].absent == {"processes": Absence.NO_PERMISSION}
    assert reading.samples[0].used_bytes == library.cards[0].total - library.cards[0].free - (1 << 30)


CODES = [*range(1, 31), 999]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("where", ["all", "init", "handles", "memory", "others"])
def test_every_error_code_is_a_state(install: Install, code: int, where: str) -> None:
    """Whatever fails, and wherever: a reading with a word, twice, and a good one after it."""
    library = install(*cards(2))
    now = [100.0]
    reader = NvmlSession(Nvml(pynvml), [parse_selector("all")], lambda: now[0])
    reader.read()
    names = {
        "all": ["nvmlInitWithFlags", *[name for name in library.functions if name.startswith("nvmlDevice")]],
        "init": ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"],
        "handles": ["nvmlDeviceGetHandleByIndex_v2"],
        "memory": ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"],
        "others": [
            *("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksEventReasons"),
            *(
                "nvmlDeviceGetTotalEccErrors",
                "nvmlEventSetWait_v2",
                "nvmlDeviceGetComputeRunningProcesses_v3",
            ),
        ],
    }[where]
    library.errors = dict.fromkeys(names, code)
    for _ in range(2):
        now[0] += 6
        reading = reader.read()
        reader.wait(0)
        assert (reading.fault is None) == bool(reading.samples)
        for sample in reading.samples:
            assert sample.free_bytes is not None or sample.absent["free_bytes"]
    library.errors = {}
    now[0] += 60
    reading = reader.read()
    now[0] += 60
    reading = reader.read()
    assert reading.fault is None
    assert [sample.free_bytes for sample in reading.samples] == [card.free for card in library.cards]


def test_the_documentation_has_the_same_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    rows = [line.strip("| ").split(" | ")[:3] for line in text.splitlines() if line.startswith("| ")]
    told = [(int(xid), kind.strip("`"), words) for xid, words, kind in (r for r in rows if r[0].isdigit())]
    assert told == [(xid, str(kind), words) for xid, kind, words in table()]
