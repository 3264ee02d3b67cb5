"""This machine as ``kvctl doctor`` sees it: cards, folders, descriptors, clock."""

import ctypes
import os
import time
from collections.abc import Iterator, Mapping

from kvctl.cli.card_remedies import CARD_REMEDIES
from kvctl.cli.doctor_findings import Finding, failed, passed, warned
from kvctl.core.telemetry import GpuSample
from kvctl.gpu.base import GpuReading
from kvctl.gpu.nvml import make_source
from kvctl.settings.model import Settings
from kvctl.settings.surroundings import warnings

_OTHER_PLACE = "run as the service's user, or set another place"
_PARTS: Mapping[str, tuple[str, str]] = {  # what is good of it, and the remedy
    "state_dir": ("overrides and audit can be written", _OTHER_PLACE),
    "admin_socket": ("its folder can be written", _OTHER_PLACE),
    "descriptors": (
        "enough for thousands of requests at once",
        "raise LimitNOFILE in the unit, or ulimit -Hn",
    ),
}
_UNSYNCHRONISED = 5  # adjtimex: TIME_ERROR
_TIMEX_BYTES = 512  # larger than the kernel's struct
_NOT_BEFORE = 1_700_000_000  # a clock that stands before this release was never set


async def cards(settings: Settings, timeout_s: float) -> tuple[list[Finding], tuple[GpuSample, ...]]:
    """Driver, device access, and each card."""
    source = make_source(settings.gpus, timeout_s=timeout_s)
    if source is None:
        return [passed("gpu", "none is watched (gpus = none)")], ()
    try:
        reading = await source.read()
    finally:
        await source.close()
    if reading.fault is not None:
        remedy = CARD_REMEDIES.get(reading.fault, "see nvidia-smi")
        text = f"{reading.detail or reading.fault}; GPU memory puts no pressure on the budget"
        return [warned("gpu", text, remedy)], ()
    return list(_cards(reading)), reading.samples


def _cards(reading: GpuReading) -> Iterator[Finding]:
    for card in reading.samples:
        name = f"{card.index if card.index is not None else '?'}: {card.name or card.uuid}"
        if card.lost:
            yield failed("gpu", f"{name} is lost", "reset or replace it; see dmesg for Xid")
        elif card.free_bytes is None or card.total_bytes is None:
            yield warned(
                "gpu", f"{name}: its memory cannot be read", "is it in MIG mode? Name the instance in gpus"
            )
        else:
            free, total = card.free_bytes / 2**30, card.total_bytes / 2**30
            yield passed("gpu", f"{name}, {free:.1f} of {total:.1f} GiB free")
    if reading.detail:
        yield warned("gpu", reading.detail, "set gpus to cards that are there: see nvidia-smi -L")


def surroundings(settings: Settings) -> Iterator[Finding]:
    """Folders and limits, by the same judgement as the daemon's start."""
    told = {sentence.split(":")[0].split()[0]: sentence for sentence in warnings(settings)}
    for part, (good, remedy) in _PARTS.items():
        yield warned(part, told[part], remedy) if part in told else passed(part, good)


def clock() -> Finding:
    """Overrides end and audit lines are dated by the wall clock."""
    if time.time() < _NOT_BEFORE:
        return failed(
            "clock", time.strftime("it is %Y here", time.gmtime()), "set the clock (chronyc, timedatectl)"
        )
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # all zeros: read only
    except (OSError, AttributeError):
        return passed("clock", "set; whether it is synchronised cannot be read here")
    if state == _UNSYNCHRONISED:
        return warned("clock", "not synchronised by this kernel's account", "run chrony or systemd-timesyncd")
    if state < 0:
        return passed("clock", f"set; synchronisation unknown ({os.strerror(ctypes.get_errno())})")
    return passed("clock", "synchronised")
