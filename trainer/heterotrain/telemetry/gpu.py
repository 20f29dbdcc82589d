"""Samples what NVIDIA's driver reports of this rank's GPU, in a thread of its own, by ``nvidia-ml-py``.

The driver's own library (NVML) comes with the driver: container runtimes mount it into each pod with a GPU. A driver
that hangs holds up this thread only. Its last values then go stale and are no longer exported, while everything else
still is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Final

import pynvml
import torch
from heterotrain_core.contract import metrics as names

from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
"""Time between two samples: the longest period over which drivers average."""
KEPT: Final = 10
"""Samples whose mean utilisation is exported: a single one is either 0 or 1 for steps of about a second."""
STALE_S: Final = 10.0
"""A newest sample of this age is not exported."""

Reading = Mapping[str, float]
"""Gauges of the contract by name; those that the driver does not have, such as the use of a part (MIG), are missing."""


class GpuSamples:
    """The newest samples of one GPU. Any thread may use it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Take times from ``now_s``, a clock that only moves forward."""
        self._now_s = now_s
        self._kept: deque[tuple[float, Reading]] = deque(maxlen=KEPT)

    def add(self, reading: Reading) -> None:
        """Keep a sample of now."""
        self._kept.append((self._now_s(), reading))

    def gauges(self) -> Reading:
        """Return the mean utilisation, and the newest of all others; nothing if they are stale."""
        kept = self._kept.copy()
        if not kept or self._now_s() - kept[-1][0] >= STALE_S:
            return {}
        newest = kept[-1][1]
        if names.GPU_UTILIZATION not in newest:
            return newest
        busy = [reading[names.GPU_UTILIZATION] for _, reading in kept if names.GPU_UTILIZATION in reading]
        return {**newest, names.GPU_UTILIZATION: fmean(busy)}


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
            found[names.GPU_UTILIZATION] = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        with contextlib.suppress(pynvml.NVMLError):
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(device)
            found |= {names.GPU_MEMORY_USED: float(memory.used), names.GPU_MEMORY_TOTAL: float(memory.total)}
        with contextlib.suppress(pynvml.NVMLError):
            found[names.GPU_POWER] = pynvml.nvmlDeviceGetPowerUsage(device) / 1000
        with contextlib.suppress(pynvml.NVMLError):
            found[names.GPU_TEMPERATURE] = float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU))
        return found

    return read


def watch(device: torch.device, report: RankMetrics) -> None:
    """Export the gauges of this rank's GPU until the process ends; do nothing on a CPU or a GPU of another maker."""
    if device.type != "cuda" or torch.version.hip:
        return
    sample(str(torch.cuda.get_device_properties(device).uuid), report)


def sample(uuid: str, report: RankMetrics, *, every_s: float = EVERY_S) -> threading.Event:
    """Start the thread that samples a GPU, and return an event that ends it.

    Args:
        uuid: of the GPU, as CUDA has it.
        report: exports the gauges.
        every_s: seconds between two samples.
    """
    samples, end = GpuSamples(), threading.Event()
    report.look_up(gauges=samples.gauges)
    threading.Thread(target=_run, args=(uuid, samples, every_s, end), name="heterotrain-gpu", daemon=True).start()
    return end


def _run(uuid: str, samples: GpuSamples, every_s: float, end: threading.Event) -> None:
    try:
        read = open_gpu(uuid)
    except pynvml.NVMLError as error:
        _log.info("the utilisation of the GPU %s is not exported: %s", uuid, error)
        return
    while not end.wait(every_s):
        samples.add(read())
