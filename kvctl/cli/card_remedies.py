"""What to do when no card can be read."""

from collections.abc import Mapping

from kvctl.core.outcomes import SourceFault

CARD_REMEDIES: Mapping[str, str] = {
    SourceFault.LIBRARY_MISSING: "install the NVIDIA driver, or set gpus = none where there is no card",
    SourceFault.DRIVER_MISMATCH: "reboot or reload the driver: library and kernel module differ",
    SourceFault.NO_PERMISSION: "let this user open /dev/nvidia* (systemd: DeviceAllow, containers: --gpus)",
    SourceFault.NO_DEVICE: "see nvidia-smi -L, and set gpus to the engine's cards",
    SourceFault.CRASHED: "the driver's library crashes: see dmesg for Xid, and nvidia-smi",
    SourceFault.HUNG: "a card or the driver hangs: see dmesg for Xid",
    SourceFault.RELEASED: "kvctl gpu acquire ends that",
}


def no_reading(fault: str) -> str:
    """One line for a fault of all cards, with its remedy."""
    return f"no reading of cards: {fault}; {CARD_REMEDIES.get(fault, 'see the log, and nvidia-smi')}"
