"""`make bench-mathematics`, second part: duration and quality of layouts for models larger than one device. Markdown.

Pure computation on one core, for docs/benchmarks.md. The model has 48 units of 2.2 GB of training state. Kinds of
devices differ 4.5-fold in speed and fivefold in memory.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import TypeVar

from heterotrain_core.contract.plan import LayoutKind
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.step_bound import least_step
from heterotrain_planner.layout.template_table import TemplateTable, template_table

SPEEDS = (1.0, 1.8, 3.2, 4.5)
"""Seconds of a unit, relative to the fastest kind."""
MEMORY_BYTES = (80e9, 40e9, 24e9, 16e9)
SIZES = (1, 2, 4)
REPEATS = 3
KINDS = frozenset({LayoutKind.REPLICATED, LayoutKind.PIPELINE})
BETWEEN, WITHIN = Link(bytes_per_s=3e9, latency_s=2e-5), Link(bytes_per_s=50e9, latency_s=5e-6)
CASES = (
    # devices of each kind, units, whether links within a kind are faster
    ((4, 4), 32, True),
    ((32, 32), 48, True),
    ((21, 21, 21), 48, True),
    ((16, 16, 16, 16), 48, False),
    ((16, 16, 16, 16), 48, True),
    ((128, 128, 128, 128), 48, True),
)

Answer = TypeVar("Answer")


def a_problem(counts: tuple[int, ...], units: int, *, fast_within: bool) -> Problem:
    """Return a model of nearly equal units: each fourth one takes a tenth longer."""
    names = [f"kind-{index}" for index in range(len(counts))]
    profiles = []
    for unit in range(units):
        base_s = 0.01 * (1.1 if unit % 4 == 0 else 1.0)
        seconds = {
            name: tuple(
                UnitSeconds(
                    micro_batch_samples=size,
                    forward_s=base_s * slow * (size + 0.5) / 1.5,
                    backward_s=2 * base_s * slow * (size + 0.5) / 1.5,
                )
                for size in SIZES
            )
            for name, slow in zip(names, SPEEDS, strict=False)
        }
        profiles.append(
            UnitProfile(
                name=f"blocks.{unit}",
                parameter_bytes=550_000_000,
                activation_bytes=180_000_000,
                boundary_bytes=16_000_000,
                seconds=seconds,
            )
        )
    return Problem(
        units=tuple(profiles),
        kinds=tuple(
            DeviceKind(name=name, count=count, memory_bytes=int(size))
            for name, count, size in zip(names, counts, MEMORY_BYTES, strict=False)
        ),
        default_link=BETWEEN,
        links={(name, name): WITHIN for name in names} if fast_within else {},
        batch_samples=2048,
        micro_batches=SIZES,
        least_members=2,
    )


def timed(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """Return the answer and the CPU seconds, the best of several calls, to exclude other work on the machine."""
    found = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        answer = call()
        found.append(time.process_time() - start_s)
    return answer, min(found)


def main() -> None:
    """Print the table."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| devices, units, links | templates | cover | after a loss | bound | members | gap, proved "
        "| of the flow bound |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for counts, units, fast_within in CASES:
        problem = a_problem(counts, units, fast_within=fast_within)
        templates, book_s = timed(lambda p=problem: template_table(p))  # type: ignore[misc]  # bound now
        if not isinstance(templates, TemplateTable):
            raise SystemExit(templates.reason)
        best, cover_s = timed(lambda b=templates: cover(b))  # type: ignore[misc]  # bound now
        left = (counts[0] - 1, *counts[1:])
        again, loss_s = timed(lambda b=templates, d=left: cover(b, devices=d))  # type: ignore[misc]  # bound now
        if not isinstance(best, Cover) or not isinstance(again, Cover):
            raise SystemExit("a case has no cover")
        step_s = best.step_s
        least_s, bound_s = timed(
            lambda b=templates, d=counts, s=step_s: least_step(b, d, KINDS, known_s=s)  # type: ignore[misc]  # bound now
        )
        links = "faster within a kind" if fast_within else "all equal"
        print(
            f"| {' + '.join(map(str, counts))}, {units}, {links} | {book_s:.2f} s | {cover_s:.2f} s | {loss_s:.2f} s "
            f"| {bound_s:.2f} s | {len(best.members)} | {step_s / least_s - 1:.2%} "
            f"| {best.prediction.efficiency:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
