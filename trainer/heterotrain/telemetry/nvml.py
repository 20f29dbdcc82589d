"""What NVIDIA's driver reports about a GPU, by its management library NVML.

The library comes with the driver: container runtimes mount it into each pod with a GPU, so nothing has to be installed.
Only functions that every driver of docs/support.md has are called. Types and signatures are those of ``nvml.h``
(NVIDIA, "NVML API Reference Guide").
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LIBRARY: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0
_GPU_SENSOR: Final = 0
"""``NVML_TEMPERATURE_GPU``: the sensor of the chip itself."""
_PERCENT, _MILLI = 100.0, 1000.0


class NvmlError(Exception):
    """The library cannot be used for this GPU; the message says why."""


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the driver reports now; ``None`` for a value that it does not have.

    Attributes:
        utilization_ratio: part of the driver's last sampling period (1/6 s to 1 s) in which a kernel of any process
            ran; the driver has none for a part of a divided GPU (MIG).
        memory_used_bytes: of all processes.
        memory_total_bytes: of the device.
        power_w: drawn by the whole card, in watts.
        temperature_c: of the chip, in degrees Celsius.
    """

    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


def open_gpu(uuid: str, *, library: str = LIBRARY) -> Callable[[], Reading]:
    """Return a function that reads one GPU, or a part of one. Both may block for as long as the driver hangs.

    Args:
        uuid: as CUDA has it, without a prefix.
        library: name or path of the library.

    Raises:
        NvmlError: there is no such library, it does not start, or it does not show this GPU.
    """
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        _check(nvml, nvml.nvmlInit_v2())
        handle = _handle(nvml, uuid)
    except (OSError, AttributeError) as error:  # no file, or a file without these functions
        raise NvmlError(f"{library} cannot be used ({error})") from error

    def read() -> Reading:
        utilization, memory = _Utilization(), _Memory()
        power, temperature = ctypes.c_uint(), ctypes.c_uint()

        def has(function: str, *arguments: object) -> bool:
            try:
                return bool(getattr(nvml, function)(handle, *arguments) == _SUCCESS)
            except AttributeError:  # this driver lacks the function
                return False

        runs = has("nvmlDeviceGetUtilizationRates", ctypes.byref(utilization))
        holds = has("nvmlDeviceGetMemoryInfo", ctypes.byref(memory))
        draws = has("nvmlDeviceGetPowerUsage", ctypes.byref(power))
        warms = has("nvmlDeviceGetTemperature", ctypes.c_int(_GPU_SENSOR), ctypes.byref(temperature))
        return Reading(
            utilization_ratio=utilization.gpu / _PERCENT if runs else None,
            memory_used_bytes=float(memory.used) if holds else None,
            memory_total_bytes=float(memory.total) if holds else None,
            power_w=power.value / _MILLI if draws else None,
            temperature_c=float(temperature.value) if warms else None,
        )

    return read


def _handle(nvml: ctypes.CDLL, uuid: str) -> ctypes.c_void_p:
    """Return NVML's handle of a GPU, or of a part of a divided one: CUDA names both without the prefix."""
    handle = ctypes.c_void_p()
    code = _SUCCESS
    for prefix in ("GPU-", "MIG-"):
        code = nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}".encode(), ctypes.byref(handle))
        if code == _SUCCESS:
            return handle
    raise NvmlError(f"NVML does not show the GPU {uuid} ({_text(nvml, code)})")


def _check(nvml: ctypes.CDLL, code: int) -> None:
    if code != _SUCCESS:
        raise NvmlError(f"NVML does not start ({_text(nvml, code)})")


def _text(nvml: ctypes.CDLL, code: int) -> str:
    found = nvml.nvmlErrorString(code)
    return found.decode(errors="replace") if isinstance(found, bytes) else f"error {code}"
