"""Processor seconds that each part may take, on a processor of a known speed.

A part's processor seconds depend on the machine and on what else it does: two programs on one core with two threads
take up to twice as many. Therefore a fixed piece of work is timed every few seconds while tests run, in processor
seconds of its own. Where it takes longer than on the machine of the budget, the tests' seconds are divided by that.
What remains: memory and caches that other programs use slow tests more than the fixed work. A part fails only at
``MARGIN`` above its budget, and a faster machine's seconds are taken as they are.
"""

from __future__ import annotations

import statistics
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MARGIN: Final = 1.15
SAMPLE_EVERY_S: Final = 5.0
ROUNDS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Processor seconds by part, and those of the fixed work on the machine that they were measured on."""

    parts_s: Mapping[str, float]
    work_s: float


def budget_of(project: Path) -> Budget:
    """Return the budget in ``pyproject.toml``.

    Raises:
        ValueError: a number in it is not positive.
    """
    table = tomllib.loads(project.read_text())["tool"]["heterotrain"]["budget"]
    numbers = {name: float(number) for name, number in table.items()}
    if wrong := [name for name, number in numbers.items() if not 0 < number < float("inf")]:
        raise ValueError(f"the budget of {wrong[0]!r} in {project} is {numbers[wrong[0]]}: write a positive number")
    work_s = numbers.pop("fixed-work")
    return Budget(numbers, work_s)


def slowness(samples_s: list[float], reference_s: float) -> float:
    """Return how many times as long the fixed work took, and at least 1; 1 without samples."""
    return max(1.0, statistics.median(samples_s) / reference_s) if samples_s else 1.0


def excess(name: str, processor_s: float, slow: float, budget: Budget) -> str:
    """Return a sentence if a part exceeds its budget by more than the margin, or an empty text."""
    allowed_s = budget.parts_s.get(name)
    if allowed_s is None or processor_s / slow <= allowed_s * MARGIN:
        return ""
    return (
        f"{name}: {processor_s / slow:.0f} processor seconds exceed the budget of {allowed_s:.0f} by more than "
        f"{MARGIN - 1:.0%}: make tests cheaper or thorough, or raise the budget in pyproject.toml and say why"
    )


def fixed_work_s() -> float:
    """Do the fixed work and return the processor seconds of this thread that it took."""
    began_s = time.thread_time()
    table: dict[int, str] = {}
    for number in range(ROUNDS):
        table[number * 7919 % 4096] = str(number)
    return time.thread_time() - began_s


@dataclass(slots=True)
class Sampler:
    """Times the fixed work in the background; ``samples_s`` has the moment and the duration of each time."""

    samples_s: list[tuple[float, float]] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def between(self, first_s: float, last_s: float) -> list[float]:
        """Return durations within a time of the monotonic clock."""
        return [taken_s for at_s, taken_s in self.samples_s if first_s <= at_s <= last_s]

    def _sample(self) -> None:
        while not self._ends.wait(SAMPLE_EVERY_S):
            fixed_work_s()  # wakes the processor and fills its caches
            self.samples_s.append((time.monotonic(), fixed_work_s()))
