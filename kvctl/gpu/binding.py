"""Finds the right Python binding of NVML, and turns its errors into codes.

The binding is the distribution ``nvidia-ml-py``, whose module is called ``pynvml``. If a deprecated
distribution named ``pynvml`` is installed too, its package can take the module's place, with older names and
a warning at every start. Then nvidia-ml-py's own file is loaded, and ``shadowed`` says so.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from kvctl.core.outcomes import Absence, SourceFault

_DISTRIBUTION = "nvidia-ml-py"
_MODULE = "pynvml"
_PRIVATE_NAME = "kvctl._nvidia_ml_py"


class Code(IntEnum):
    """The NVML return codes that kvctl tells apart (nvml.h; the values are its ABI)."""

    UNINITIALIZED = 1
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
"""The card, not NVML, is gone."""

SESSION_LOST = frozenset({Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIB_RM_VERSION_MISMATCH})
"""NVML itself is gone: nothing answers until it is initialised anew."""

_FAULTS: dict[int, SourceFault] = {
    Code.LIBRARY_NOT_FOUND: SourceFault.LIBRARY_MISSING,
    Code.DRIVER_NOT_LOADED: SourceFault.LIBRARY_MISSING,
    Code.LIB_RM_VERSION_MISMATCH: SourceFault.DRIVER_MISMATCH,
    Code.NO_PERMISSION: SourceFault.NO_PERMISSION,
    Code.OPERATING_SYSTEM: SourceFault.NO_PERMISSION,
    Code.NOT_FOUND: SourceFault.NO_DEVICE,
    Code.GPU_NOT_FOUND: SourceFault.NO_DEVICE,
}

_ABSENCES: dict[int, Absence] = {
    Code.NOT_SUPPORTED: Absence.NOT_SUPPORTED,
    Code.FUNCTION_NOT_FOUND: Absence.NOT_SUPPORTED,
    Code.ARGUMENT_VERSION_MISMATCH: Absence.NOT_SUPPORTED,
    Code.NO_PERMISSION: Absence.NO_PERMISSION,
    Code.OPERATING_SYSTEM: Absence.NO_PERMISSION,
    Code.GPU_IS_LOST: Absence.LOST,
    Code.RESET_REQUIRED: Absence.LOST,
    Code.GPU_NOT_FOUND: Absence.LOST,
}


class NvmlFailure(Exception):  # noqa: N818 - a failed call, told by its code
    """An NVML call that did not succeed."""

    def __init__(self, code: int, call: str, text: str = "") -> None:
        super().__init__(f"{call}: {text or f'error {code}'}")
        self.code = code

    @property
    def fault(self) -> SourceFault:
        """The word for a poll that failed with it."""
        return _FAULTS.get(self.code, SourceFault.FAILED)

    @property
    def absence(self) -> Absence:
        """The word for a reading that failed with it."""
        return _ABSENCES.get(self.code, Absence.FAILED)


class Nvml:
    """Calls into the binding; every failure of a call is an NvmlFailure."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def call(self, name: str, *arguments: Any) -> Any:
        """``module.name(*arguments)``. A function that binding or driver lack is FUNCTION_NOT_FOUND."""
        function = getattr(self.module, name, None)
        if function is None:
            raise NvmlFailure(Code.FUNCTION_NOT_FOUND, name, "not in this binding")
        try:
            return function(*arguments)
        except self.module.NVMLError as error:
            raise NvmlFailure(error.value, name, str(error)) from error
        except Exception as error:  # a binding and a driver of different ages fail in many ways
            raise NvmlFailure(Code.UNKNOWN, name, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The loaded binding. ``shadowed`` tells what stands in its way, "" for nothing."""

    module: ModuleType
    version: str
    shadowed: str = ""


def load_binding() -> Binding:
    """Import nvidia-ml-py's module, past anything that shadows it. Raises ImportError without one."""
    try:
        found = distribution(_DISTRIBUTION)
    except PackageNotFoundError:  # vendored without its metadata
        return Binding(module=importlib.import_module(_MODULE), version="unknown")
    own = Path(str(found.locate_file(f"{_MODULE}.py")))
    spec = importlib.util.find_spec(_MODULE)
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or not own.is_file() or origin.resolve() == own.resolve():
        return Binding(module=importlib.import_module(_MODULE), version=found.version)
    shadowed = f"{origin} shadows {_DISTRIBUTION}: remove the deprecated distribution {_MODULE}"
    return Binding(module=_load_file(own), version=found.version, shadowed=shadowed)


def _load_file(path: Path) -> ModuleType:
    """The module in ``path``, under a name that nothing else imports."""
    if _PRIVATE_NAME in sys.modules:
        return sys.modules[_PRIVATE_NAME]
    spec = importlib.util.spec_from_file_location(_PRIVATE_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PRIVATE_NAME] = module  # the binding looks itself up while it is being executed
    spec.loader.exec_module(module)
    return module
