"""Samples this rank's GPU, its use and its memory, in a thread of its own; exported with the rank's other gauges.

A driver that hangs holds up this thread only. Its last values then go stale and are no longer exported, while
everything else still is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

import pynvml
import torch
from heterotrain_core.contract import metrics as names

from heterotrain.telemetry.nvml import Reading, open_gpu
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
"""Time between two samples: the longest period over which drivers average."""
KEPT: Final = 10
"""Samples whose mean is exported: a single one is either 0 or 1 for steps of about a second."""
STALE_S: Final = 10.0
"""A newest sample of this age is not exported."""


class GpuSamples:
    """The newest samples of one GPU. Any thread may use it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Take times from ``now_s``, a clock that only moves forward."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kept: deque[tuple[float, Reading]] = deque(maxlen=KEPT)

    def add(self, reading: Reading) -> None:
        """Keep a sample of now."""
        with self._lock:
            self._kept.append((self._now_s(), reading))

    def gauges(self) -> dict[str, float]:
        """Return the gauges of the contract: the mean utilisation, and the newest of all others; empty if stale."""
        with self._lock:
            kept = tuple(self._kept)
        if not kept or self._now_s() - kept[-1][0] >= STALE_S:
            return {}
        newest = kept[-1][1]
        busy = [reading.utilization_ratio for _, reading in kept if reading.utilization_ratio is not None]
        found = {
            names.GPU_UTILIZATION: fmean(busy) if busy and newest.utilization_ratio is not None else None,
            names.GPU_MEMORY_USED: newest.memory_used_bytes,
            names.GPU_MEMORY_TOTAL: newest.memory_total_bytes,
            names.GPU_POWER: newest.power_w,
            names.GPU_TEMPERATURE: newest.temperature_c,
        }
        return {name: value for name, value in found.items() if value is not None}


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
