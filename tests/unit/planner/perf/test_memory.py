"""Micro-batch caps from declarations, peak memory and out-of-memory errors."""

from __future__ import annotations

import math

import pytest
from heterotrain_planner.perf.memory import USABLE_PART, MemoryPeak, micro_batch_cap

GIB = 2.0**30


def seen(samples: int, gib: float) -> MemoryPeak:
    """Return a step that fitted."""
    return MemoryPeak(micro_batch_samples=samples, peak_bytes=gib * GIB)


def failed(samples: int) -> MemoryPeak:
    """Return a step that did not."""
    return MemoryPeak(micro_batch_samples=samples, ran_out=True)


@pytest.mark.parametrize(
    ("peaks", "declared", "memory_gib", "cap", "words"),
    [
        ([], None, None, None, "no limit"),
        ([], 24, None, 24, "declared"),
        ([seen(8, 6.0)], None, 16.0, None, "no limit"),
        ([seen(8, 6.0), seen(16, 8.0)], None, None, None, "no limit"),
        ([seen(8, 6.0), seen(16, 8.0)], None, 16.0, 16 + math.floor((16 * USABLE_PART - 8) / 0.25), "each further"),
        (
            [seen(8, 6.0), seen(16, 8.0), seen(16, 7.0)],
            None,
            16.0,
            16 + math.floor((16 * USABLE_PART - 8) / 0.25),
            "8 GiB",
        ),
        ([seen(8, 6.0), seen(16, 8.0), failed(32)], None, 80.0, 16, "half"),
        ([failed(32), failed(48)], None, None, 16, "half"),
        ([failed(1)], None, None, 1, "half"),
        ([seen(8, 6.0), seen(16, 15.9)], None, 16.0, 16, "each further"),
        ([seen(8, 6.0), seen(16, 8.0)], 12, 16.0, 12, "declared"),
        ([seen(8, 6.0), seen(16, 5.0)], None, 16.0, None, "no limit"),
        ([seen(8, math.nan), seen(-4, 8.0), MemoryPeak(micro_batch_samples=3)], None, 16.0, None, "no limit"),
    ],
)
def test_caps(
    peaks: list[MemoryPeak], declared: int | None, memory_gib: float | None, cap: int | None, words: str
) -> None:
    """The least of all that is known, with its reason."""
    found = micro_batch_cap(peaks, declared=declared, memory_bytes=None if memory_gib is None else memory_gib * GIB)
    assert found.samples == cap
    assert words in found.reason


def test_a_measured_model() -> None:
    """GPT 2.7B in fp32 (Cephalo's table, GiB at 1 … 5): the cap from the first three predicts the next two."""
    table = [2.02, 2.42, 2.89, 3.47, 4.06]
    found = micro_batch_cap([seen(i + 1, gib) for i, gib in enumerate(table[:3])], memory_bytes=4.1 / USABLE_PART * GIB)
    assert found.samples == 5


@pytest.mark.parametrize(("memory_gib", "cap"), [(100.0, 92), (25.0, 23), (50.0, 46), (99.0, 91)])
def test_eight_per_cent_of_a_device_stay_free(memory_gib: float, cap: int) -> None:
    """Each sample takes one GiB: by hand, 92 of 100 fit."""
    assert micro_batch_cap([seen(1, 1.0), seen(2, 2.0)], memory_bytes=memory_gib * GIB).samples == cap
