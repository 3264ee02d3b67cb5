from collections.abc import Callable
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from kvctl.core.outcomes import Absence
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.binding import Code, Nvml
from kvctl.gpu.enumerate import enumerate_cards
from kvctl.gpu.readings import MemoryReader, read_card
from tests.nvml.conftest import Install
from tests.nvml.fake_library import GIB, FakeCard, cards

Said = Callable[[], list[str]]
BYTES = ("total_bytes", "free_bytes", "used_bytes", "reserved_bytes")
MEMINFO = "MemTotal:       131072 kB\nMemFree: 1 kB\nMemAvailable:    65536 kB\n"


def read_one(reader: MemoryReader | None = None) -> GpuSample:
    nvml = Nvml(pynvml)
    if not getattr(pynvml.nvmlLib, "open", 0):
        nvml.call("nvmlInit")
    card = enumerate_cards(nvml)[0]
    return read_card(nvml, card, reader or MemoryReader(nvml), 7.0)[0]


def test_everything_of_a_healthy_card(install: Install) -> None:
    """D04: the driver's reserve is told apart from what is used."""
    install(FakeCard("GPU-a", free=100 * GIB, temperature=61, ecc=3))
    assert read_one() == GpuSample(
        uuid="GPU-a",
        at=7.0,
        index=0,
        name="NVIDIA H200",
        total_bytes=140 * GIB,
        free_bytes=100 * GIB,
        used_bytes=39 * GIB,
        reserved_bytes=GIB,
        temperature_c=61.0,
        throttle_reasons=(),
        ecc_uncorrected_total=3,
        absent={},
    )


@pytest.mark.parametrize("code", [Code.UNKNOWN, Code.NOT_SUPPORTED, Code.ARGUMENT_VERSION_MISMATCH])
def test_v2_that_fails_falls_back_to_v1_once_and_says_so_once(
    install: Install, said: Said, code: Code
) -> None:
    """D05, D04: v2 fails, v1 serves from then on, one line; free is the same in both."""
    library = install(FakeCard("GPU-a", errors={"nvmlDeviceGetMemoryInfo_v2": code}))
    reader = MemoryReader(Nvml(pynvml))
    first, second = read_one(reader), read_one(reader)
    assert first.free_bytes == second.free_bytes == 100 * GIB
    assert first.used_bytes == 40 * GIB  # v1 counts the reserve as used
    assert first.absent == {"reserved_bytes": Absence.NOT_SUPPORTED}
    assert library.calls.count("nvmlDeviceGetMemoryInfo_v2") == 1
    assert [line for line in said() if "older call" in line] == said()
    assert len(said()) == 1


def test_a_driver_without_v2(install: Install) -> None:
    """D05: a driver without the versioned call."""
    library = install(FakeCard("GPU-a"))
    library.without = {"nvmlDeviceGetMemoryInfo_v2"}
    assert read_one().free_bytes == 100 * GIB


def test_unified_memory_is_the_systems(install: Install, tmp_path: Path) -> None:
    """D01: both memory calls are Not Supported on a GB10: the system's MemAvailable, said so in the name."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    errors = dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), int(Code.NOT_SUPPORTED))
    install(FakeCard("GPU-a", name="NVIDIA GB10", errors=errors))
    sample = read_one(MemoryReader(Nvml(pynvml), tmp_path / "meminfo"))
    assert (sample.total_bytes, sample.free_bytes) == (131072 * 1024, 65536 * 1024)
    assert sample.name == "NVIDIA GB10 (unified memory: system MemAvailable)"
    assert sample.absent == dict.fromkeys(("used_bytes", "reserved_bytes"), Absence.NOT_SUPPORTED)


@pytest.mark.parametrize("text", ["", "MemTotal: x kB\n", "MemTotal:\n", "MemTotal: 5 kB\n"])
def test_unified_memory_without_a_readable_system_is_unknown(
    install: Install, tmp_path: Path, text: str
) -> None:
    """D01: unknown memory is unknown, and nothing raises."""
    (tmp_path / "meminfo").write_text(text)
    errors = dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), int(Code.NOT_SUPPORTED))
    install(FakeCard("GPU-a", errors=errors))
    sample = read_one(MemoryReader(Nvml(pynvml), tmp_path / "meminfo"))
    assert sample.free_bytes is None
    assert sample.absent == dict.fromkeys(BYTES, Absence.NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("total", "free"), [(0, 0), (GIB, 2 * GIB), ((1 << 64) - 1, 0), ((1 << 64) - 1, (1 << 64) - 1)]
)
def test_impossible_memory_is_unknown_not_clamped(install: Install, total: int, free: int) -> None:
    """D18: 2**64-1 is no number of bytes."""
    install(FakeCard("GPU-a", total=total, free=free, reserved=0))
    sample = read_one()
    assert [getattr(sample, name) for name in BYTES] == [None] * 4
    assert {sample.absent[name] for name in BYTES} == {Absence.OUT_OF_RANGE}


def test_an_impossible_reserve_leaves_the_rest(install: Install) -> None:
    install(FakeCard("GPU-a", total=10 * GIB, free=9 * GIB, reserved=2 * GIB))  # used comes out negative
    sample = read_one()
    assert sample.free_bytes == 9 * GIB
    assert sample.used_bytes is None
    assert sample.absent == {"used_bytes": Absence.OUT_OF_RANGE}


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x1, ()),  # idle is no throttling
        (0x4 | 0x40, ("sw_power_cap", "hw_thermal")),
        (0x80 | 0x8, ("hw_slowdown", "hw_power_brake")),
        (0x1 | 1 << 40, ("other",)),
    ],
)
def test_throttle_reasons_are_words(install: Install, bits: int, words: tuple[str, ...]) -> None:
    install(FakeCard("GPU-a", clocks=bits))
    assert read_one().throttle_reasons == words


def test_older_drivers_know_the_clocks_by_another_name(install: Install) -> None:
    library = install(FakeCard("GPU-a", clocks=0x20))
    library.without = {"nvmlDeviceGetCurrentClocksEventReasons"}
    assert read_one().throttle_reasons == ("sw_thermal",)


ERRORS = [
    value
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and value not in (0, *(1, 9, 18), *(15, 16, 28))
]


@pytest.mark.parametrize("code", sorted(set(ERRORS)))
def test_every_error_of_every_reading_is_an_absence(install: Install, code: int) -> None:
    names = (
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMigMode",
    )
    install(FakeCard("GPU-a", errors=dict.fromkeys(names, code)))
    sample = read_one()
    assert sample.free_bytes == 100 * GIB
    assert sample.absent.keys() == {"temperature_c", "throttle_reasons", "ecc_uncorrected_total"}
    memory = dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), code)
    install(FakeCard("GPU-a", errors=memory))
    if code != Code.NOT_SUPPORTED:
        assert read_one().absent.keys() == set(BYTES)


def test_a_vgpu_guest_with_memory_and_uuid_alone(install: Install) -> None:
    """D25: everything but memory and UUID is Not Supported; the total is the reported one."""
    library = install(FakeCard("GPU-a", total=8 * GIB, free=GIB, reserved=0))
    library.errors = dict.fromkeys(
        (
            "nvmlDeviceGetName",
            "nvmlDeviceGetPciInfo_v3",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetTotalEccErrors",
        ),
        Code.NOT_SUPPORTED,
    )
    sample = read_one()
    assert (sample.total_bytes, sample.free_bytes) == (8 * GIB, GIB)
    assert set(sample.absent.values()) == {Absence.NOT_SUPPORTED}


def test_an_absurd_temperature_is_out_of_range(install: Install) -> None:
    install(FakeCard("GPU-a", temperature=(1 << 32) - 1))
    sample = read_one()
    assert sample.temperature_c is None
    assert sample.absent == {"temperature_c": Absence.OUT_OF_RANGE}


def test_a_lost_card_says_so_of_every_reading(install: Install) -> None:
    install(FakeCard("GPU-a", errors={"nvmlDeviceGetMemoryInfo_v2": Code.GPU_IS_LOST}))
    sample = read_one()
    assert sample.lost
    assert set(sample.absent.values()) == {Absence.LOST}
    assert len(sample.absent) == 7


def test_cards_helper_has_distinct_uuids() -> None:
    assert len({card.uuid for card in cards(8)}) == 8
