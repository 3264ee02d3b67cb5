from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pynvml  # type: ignore[import-untyped]
import pytest

from kvctl.core.outcomes import Absence, SourceFault
from kvctl.gpu.base import GpuReading
from kvctl.gpu.binding import Code, Nvml
from kvctl.gpu.select import parse_selector
from kvctl.gpu.session import NvmlSession
from tests.nvml.conftest import Clock, Install
from tests.nvml.fake_library import GIB, FakeCard, cards, installed

Said = Callable[[], list[str]]


def session(clock: Clock, *selectors: str) -> NvmlSession:
    return NvmlSession(Nvml(pynvml), [parse_selector(text) for text in selectors or ("all",)], clock)


def uuids(reading: GpuReading) -> list[str]:
    return [sample.uuid for sample in reading.samples]


def lost(reading: GpuReading) -> list[str]:
    return [sample.uuid for sample in reading.samples if sample.lost]


def test_all_cards_in_order(install: Install, clock: Clock) -> None:
    install(*cards(3))
    reading = session(clock).read()
    assert reading.fault is None
    assert [sample.index for sample in reading.samples] == [0, 1, 2]
    assert reading.samples[0].at == 100.0


def test_no_library(clock: Clock) -> None:
    """D22: no libnvidia-ml is a state with a word."""
    with installed(None):
        reading = session(clock).read()
    assert reading.fault is SourceFault.LIBRARY_MISSING
    assert reading.samples == ()


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (Code.DRIVER_NOT_LOADED, SourceFault.LIBRARY_MISSING),
        (Code.LIB_RM_VERSION_MISMATCH, SourceFault.DRIVER_MISMATCH),
        (Code.NO_PERMISSION, SourceFault.NO_PERMISSION),
        (Code.UNKNOWN, SourceFault.FAILED),
        (Code.GPU_IS_LOST, SourceFault.FAILED),
    ],
)
def test_a_failed_init_has_its_word_and_is_retried_with_growing_pauses(
    install: Install, clock: Clock, code: Code, fault: SourceFault
) -> None:
    """D10, D22: version mismatch or no driver at start: no crash, retries at 1, 2, 4 ... 60 s."""
    library = install(*cards(1))
    library.errors["nvmlInitWithFlags"] = code
    reader = session(clock)
    tries: list[float] = []
    for tenth in range(2000):
        clock.now = 100.0 + tenth / 10
        before = len(library.calls)
        assert reader.read().fault is fault
        if len(library.calls) > before:
            tries.append(tenth / 10)
    pauses = [round(later - earlier, 1) for earlier, later in pairwise(tries)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    library.errors.clear()
    clock.now += 60
    assert len(reader.read().samples) == 1


def test_device_nodes_that_come_after_boot(install: Install, clock: Clock) -> None:
    """D24: no card at first, one later: picked up without a restart."""
    library = install()
    reader = session(clock)
    assert reader.read().fault is SourceFault.NO_DEVICE
    library.cards = cards(1)
    clock.now += 1
    assert len(reader.read().samples) == 1


def test_one_lost_card_leaves_the_others(install: Install, clock: Clock) -> None:
    """D12: of eight cards one is lost; seven are read on, the lost one is named."""
    library = install(*cards(8))
    reader = session(clock)
    assert lost(reader.read()) == []
    library.cards[3].errors["nvmlDeviceGetMemoryInfo_v2"] = Code.GPU_IS_LOST
    reading = reader.read()
    assert lost(reading) == [library.cards[3].uuid]
    assert sum(sample.free_bytes is not None for sample in reading.samples) == 7
    inits = library.calls.count("nvmlInitWithFlags")
    clock.now += 600
    reader.read()
    assert library.calls.count("nvmlInitWithFlags") == inits  # the good ones are not disturbed for it


def test_a_card_lost_before_the_start_has_a_place_too(install: Install, clock: Clock) -> None:
    """D12: a card that is lost on its handle is a lost card, the others keep their indexes."""
    library = install(*cards(3))
    library.cards[1].errors["nvmlDeviceGetHandleByIndex_v2"] = Code.GPU_IS_LOST
    assert lost(session(clock).read()) == ["index:1"]
    assert session(clock, "2").read().samples[0].uuid == library.cards[2].uuid


def test_a_denied_card_is_absent_not_lost(install: Install, clock: Clock) -> None:
    library = install(*cards(2))
    library.cards[0].errors["nvmlDeviceGetHandleByIndex_v2"] = Code.NO_PERMISSION
    first, second = session(clock).read().samples
    assert first.absent["free_bytes"] is Absence.NO_PERMISSION
    assert not first.lost
    assert second.free_bytes == 100 * GIB


def test_an_index_keeps_meaning_the_card_that_it_first_meant(
    install: Install, clock: Clock, said: Said
) -> None:
    """D09: an index is resolved to a UUID once, said in the log, and kept."""
    library = install(*cards(3))
    chosen = library.cards[1].uuid
    reader = session(clock, "1")
    assert uuids(reader.read()) == [chosen]
    assert any(chosen in line and "gpus = 1" in line for line in said())
    del library.cards[1]  # falls off; the third card is index 1 after a new start
    library.errors["nvmlDeviceGetMemoryInfo_v2"] = Code.UNINITIALIZED
    assert reader.read().fault is SourceFault.FAILED
    library.errors.clear()
    clock.now += 1
    reading = reader.read()
    assert lost(reading) == uuids(reading) == [chosen]


def test_all_reports_a_card_that_is_gone_after_a_new_start(install: Install, clock: Clock) -> None:
    library = install(*cards(3))
    gone = library.cards[1].uuid
    reader = session(clock)
    reader.read()
    library.cards[1] = replace(library.cards[1], errors={"nvmlDeviceGetHandleByIndex_v2": Code.GPU_IS_LOST})
    library.errors["nvmlDeviceGetMemoryInfo_v2"] = Code.LIB_RM_VERSION_MISMATCH
    assert reader.read().fault is SourceFault.DRIVER_MISMATCH
    library.errors.clear()
    clock.now += 1
    reading = reader.read()
    assert lost(reading) == [gone]
    assert len(reading.samples) == 3


def test_all_cards_lost_looks_again_and_finds_them(install: Install, clock: Clock) -> None:
    library = install(*cards(1))
    reader = session(clock)
    reader.read()
    library.cards[0].errors["nvmlDeviceGetMemoryInfo_v2"] = Code.GPU_IS_LOST
    assert lost(reader.read()) == uuids(reader.read())
    library.cards[0].errors.clear()
    clock.now += 5
    reading = reader.read()
    assert lost(reading) == []
    assert reading.samples[0].free_bytes == 100 * GIB
    assert library.open == 1


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.OPERATING_SYSTEM])
def test_device_access_taken_away_means_a_new_start(install: Install, clock: Clock, code: Code) -> None:
    library = install(*cards(2))
    reader = session(clock)
    reader.read()
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        library.errors[name] = code
    assert reader.read().fault is not None
    assert library.open == 0
    library.errors.clear()
    clock.now += 1
    assert len(reader.read().samples) == 2


def test_one_card_without_answer_is_no_reason_for_a_new_start(install: Install, clock: Clock) -> None:
    library = install(*cards(2))
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        library.cards[0].errors[name] = Code.OPERATING_SYSTEM
    first, second = session(clock).read().samples
    assert first.free_bytes is None
    assert second.free_bytes == 100 * GIB


def test_a_selector_that_means_nothing_yet_is_told_and_looked_for(install: Install, clock: Clock) -> None:
    library = install(*cards(1))
    reader = session(clock, "0", "05:00.0")
    reading = reader.read()
    assert len(reading.samples) == 1
    assert reading.detail == "not found: 00000000:05:00.0"
    library.cards.append(FakeCard("GPU-late", "00000000:05:00.0"))
    clock.now += 1
    reader.read()
    clock.now += 2
    reading = reader.read()
    assert uuids(reading)[1:] == ["GPU-late"]
    assert reading.detail == ""


def test_nothing_chosen_names_what_there_is(install: Install, clock: Clock) -> None:
    library = install(*cards(1))
    reading = session(clock, "GPU-ffff").read()
    assert reading.fault is SourceFault.NO_DEVICE
    assert library.cards[0].uuid in reading.detail


def partitioned(**errors: int) -> FakeCard:
    instances = {n: FakeCard(f"MIG-{n}", total=20 * GIB, free=5 * GIB, reserved=0) for n in (0, 3)}
    return FakeCard("GPU-parent", total=80 * GIB, temperature=55, mig=1, instances=instances, errors=errors)


def test_only_what_is_needed_is_asked(install: Install, clock: Clock) -> None:
    """D25: of what a guest may lack nothing is asked without need: these calls and no other."""
    library = install(*cards(2), partitioned())
    session(clock).read()
    assert set(library.calls) == {
        "nvmlInitWithFlags",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlEventSetCreate",
        "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceRegisterEvents",
    }


@pytest.mark.parametrize("selector", ["all", "0", "GPU-parent", "3b:00.0"])
def test_a_partitioned_card_is_its_instances(install: Install, clock: Clock, selector: str) -> None:
    """D07: the parent of a partitioned card is denied; its instances are read."""
    install(partitioned(nvmlDeviceGetMemoryInfo_v2=Code.NO_PERMISSION))
    reading = session(clock, selector).read()
    assert uuids(reading) == ["MIG-0", "MIG-3"]
    assert {sample.total_bytes for sample in reading.samples} == {20 * GIB}
    assert {sample.temperature_c for sample in reading.samples} == {55.0}  # the parent's


def test_one_instance_by_its_uuid(install: Install, clock: Clock) -> None:
    """D07: a MIG UUID means that instance."""
    install(partitioned())
    assert uuids(session(clock, "MIG-3").read()) == ["MIG-3"]


def test_an_instance_is_found_where_its_parent_is_denied(install: Install, clock: Clock) -> None:
    install(partitioned(nvmlDeviceGetHandleByIndex_v2=Code.NO_PERMISSION))
    (sample,) = session(clock, "MIG-3").read().samples
    assert sample.free_bytes == 5 * GIB


def test_a_partitioned_card_without_visible_instances_is_unknown_not_the_parents(
    install: Install, clock: Clock
) -> None:
    """D07: unknown, not the whole card's total."""
    install(replace(partitioned(), instances={}))
    (sample,) = session(clock).read().samples
    assert sample.total_bytes is None
    assert sample.absent["total_bytes"] is Absence.NO_PERMISSION


def test_close_gives_everything_back_and_forgets(install: Install, clock: Clock) -> None:
    library = install(*cards(2))
    reader = session(clock)
    reader.read()
    reader.close()
    assert library.open == 0
    library.cards = [FakeCard("GPU-other")]
    assert uuids(reader.read()) == ["GPU-other"]


def test_the_same_card_by_two_names_is_one_sample(install: Install, clock: Clock) -> None:
    install(partitioned(nvmlDeviceGetHandleByIndex_v2=Code.NO_PERMISSION))
    assert uuids(session(clock, "MIG-3", "mig-3").read()) == ["MIG-3"]


def test_cards_that_may_not_be_opened_are_tried_again(install: Install, clock: Clock, said: Said) -> None:
    library = install(*cards(2))
    for card in library.cards:
        card.errors["nvmlDeviceGetHandleByIndex_v2"] = Code.UNKNOWN
    reader = session(clock)
    assert [sample.absent["free_bytes"] for sample in reader.read().samples] == [Absence.NO_PERMISSION] * 2
    assert said() == []
    for card in library.cards:
        card.errors.clear()
    for _ in range(3):
        clock.now += 2
        reading = reader.read()
    assert [sample.free_bytes for sample in reading.samples] == [100 * GIB] * 2
    assert library.open == 1
