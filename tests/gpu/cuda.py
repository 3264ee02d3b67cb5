"""Just enough of the CUDA driver to take memory on a card, as a neighbour of the engine would."""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager


class CudaError(RuntimeError):
    """A CUDA call failed, or there is no CUDA here."""


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class Cuda:
    """The first device that CUDA shows; which card that is, ``uuid`` tells."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(str(error)) from error
        self._device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))

    @property
    def uuid(self) -> str:
        """As NVML writes it."""
        raw = _Uuid()
        self._call("cuDeviceGetUuid", ctypes.byref(raw), self._device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"

    @contextmanager
    def context(self) -> Iterator[None]:
        """Work on the device; its context takes some memory of its own."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._call("cuCtxSetCurrent", context)
            yield
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Hold ``size`` bytes of the device's memory. Needs a context."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        try:
            yield
        finally:
            self._call("cuMemFree_v2", pointer)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CudaError(f"{name} answers {status}")
