"""What broken formations leave behind in the survivors' processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from distributed.harness import Gate, Operator, Worker

BREAKS, EVERY, FIRST = 40, 3, 12
"""Broken formations, the steps between them, and the step of the first one."""


GLOO_S = 5.0
"""Gloo's own time-out, half an hour otherwise: it ends the operations that gloo has lost track of (ADR 13)."""


def held_by(worker: Worker) -> Counter[str]:
    """Return what a process holds: its threads, and its descriptors by kind."""
    folder = Path(f"/proc/{worker.pid}")
    found = Counter(threads=len(list((folder / "task").iterdir())))
    for descriptor in (folder / "fd").iterdir():
        try:
            found[str(descriptor.readlink()).partition(":")[0]] += 1
        except OSError:  # closed meanwhile
            continue
    return found


def test_forty_broken_formations_leave_neither_threads_nor_descriptors(operate: Callable[..., Operator]) -> None:
    """A rank loses a message in the middle of a backward pass, again and again."""
    operator = operate(epochs=100_000, peer_timeout_s=3.0)
    loses = {"place": "launched", "step": FIRST, "every": EVERY, "times": BREAKS, "do": "lose"}
    gate = Gate(operator.folder, FIRST - 2)
    workers = operator.start_workers(3, faults={0: loses, 1: gate.fault}, collective_s=GLOO_S)
    operator.plan(workers)
    operator.until(gate.reached, "all wait for one")
    before = [held_by(worker) for worker in workers]
    gate.open()
    operator.until_step(workers[0], FIRST + EVERY * BREAKS + 10)

    def as_before() -> bool:
        return all(not held_by(worker) - was for worker, was in zip(workers, before, strict=True))

    operator.until(as_before, "everything of the broken formations is released")
