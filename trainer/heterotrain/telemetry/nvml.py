"""Reads what NVIDIA's driver reports about a GPU, by its management library NVML (package ``nvidia-ml-py``).

The library itself comes with the driver: container runtimes mount it into each pod with a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

_PERCENT, _MILLI = 100.0, 1000.0


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


def open_gpu(uuid: str) -> Callable[[], Reading]:
    """Return a function that reads one GPU, or a part of one. Both may block for as long as the driver hangs.

    Args:
        uuid: as CUDA has it: without the prefix of a GPU, or of a part of a divided one.

    Raises:
        pynvml.NVMLError: there is no such library, it does not start, or it does not show this GPU.
    """
    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        device = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def read() -> Reading:
        found: dict[str, float] = {}
        with contextlib.suppress(pynvml.NVMLError):
            found["utilization_ratio"] = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / _PERCENT
        with contextlib.suppress(pynvml.NVMLError):
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(device)
            found |= {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}
        with contextlib.suppress(pynvml.NVMLError):
            found["power_w"] = pynvml.nvmlDeviceGetPowerUsage(device) / _MILLI
        with contextlib.suppress(pynvml.NVMLError):
            found["temperature_c"] = float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU))
        return Reading(**found)

    return read
