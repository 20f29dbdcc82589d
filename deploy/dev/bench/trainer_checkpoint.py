"""The cost of a checkpoint for training, compared with torch.save. Prints Markdown.

A state of weights and momentum is saved repeatedly, alternately by this trainer's writer and by ``torch.save`` with
fsync. The trainer's writer copies the state to host memory; a thread then writes, checksums and forces it to disk.
Meanwhile a loop of matrix products stands for training. Its loss is the time of the missing steps, measured against its
pace just before. On a machine with a GPU, state and matrices are in its memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.writer import CheckpointWriter
from machine import machine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE = 8192 if DEVICE.type == "cuda" else 700
"""Of the matrices that are multiplied: some ten milliseconds of a large GPU, or of one core."""


class Training:
    """A loop of equal steps."""

    def __init__(self) -> None:
        self._matrix = torch.randn(SIDE, SIDE, device=DEVICE)

    def pace_s(self, seconds: float) -> float:
        """Train undisturbed for some time; return the mean seconds of a step."""
        return seconds / self._steps_until(time.perf_counter() + seconds)

    def lost_during(self, writer: CheckpointWriter, *, pace_s: float) -> float:
        """Train until nothing is being written; return the seconds in which steps at ``pace_s`` are missing."""
        began_s, steps = time.perf_counter(), 0
        while writer.running_s is not None:
            steps += self._steps_until(0.0)
        return time.perf_counter() - began_s - steps * pace_s

    def _steps_until(self, end_s: float) -> int:
        steps = 0
        while steps == 0 or time.perf_counter() < end_s:
            torch.mm(self._matrix, self._matrix)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            steps += 1
        return steps


def state_of(size_bytes: int) -> dict[str, Any]:
    """Return weights and momentum that together take this many bytes."""
    count = 8
    side = size_bytes // 4 // 2 // count
    return {name: {str(i): torch.randn(side, device=DEVICE) for i in range(count)} for name in ("model", "optimizer")}


def saved_s(state: dict[str, Any], path: Path) -> float:
    """Save as a script does; return how long training stood still, in seconds."""
    began_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began_s


def main() -> None:
    """Print one row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    heads = (
        "state",
        "training stands still",
        "training loses in all",
        "durable after",
        "torch.save and fsync: stands still",
    )
    print(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for megabytes in arguments.megabytes:
        state = state_of(megabytes * 10**6)
        rows: dict[str, list[float]] = {"pause": [], "lost": [], "durable": [], "save": []}
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            writer = CheckpointWriter(CheckpointFolder(place, max_to_keep=2), on_done=lambda _written: None)
            training = Training()
            for step in range(arguments.repeats + 1):
                pace_s = training.pace_s(0.5)
                began_s = time.perf_counter()
                pause_s = writer.start(state, generation=1, step=step)
                lost_s = training.lost_during(writer, pace_s=pace_s)
                durable_s = time.perf_counter() - began_s
                save_s = saved_s(state, Path(place) / "saved.pt")
                if step == 0:
                    continue  # the first one also gets its memory
                for name, value in zip(rows, (pause_s, pause_s + lost_s, durable_s, save_s), strict=True):
                    rows[name].append(value)
        cells = [f"{statistics.median(v):.2f} s (p95 {sorted(v)[int(0.95 * len(v))]:.2f})" for v in rows.values()]
        print(f"| {megabytes} MB | {' | '.join(cells)} |", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
