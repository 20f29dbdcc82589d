"""Training scripts with data sets of all kinds, and with checkpoints in parts."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.scripts import net, optimizer_of, problem
from heterotrain.checkpoints import manager, writer

SAMPLES = 96
PROBLEM = problem(SAMPLES)
Sample = tuple[torch.Tensor, ...]


class Stream(torch.utils.data.IterableDataset[Sample]):
    """The problem's samples as an iterator of unknown length, backwards in odd epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch before it is read."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        for index in stream_order(self.epoch):
            yield PROBLEM[index]


def stream_order(epoch: int) -> list[int]:
    """Return the order in which the stream yields the problem's samples."""
    return list(range(SAMPLES))[:: -1 if epoch % 2 else 1]


def opened(shard: int) -> list[Sample]:
    """Return a shard of twelve samples."""
    return [PROBLEM[index] for index in range(12 * shard, 12 * shard + 12)]


def shards() -> heterotrain.Shards[int]:
    """Return the problem in eight shards."""
    return heterotrain.Shards(range(8), [12] * 8, opened)


def train(
    *, out: str, kind: str = "map", workers: int = 0, in_parts: bool = False, unshared: bool = False,
    fault: dict[str, Any] | None = None, slow_s: float = 0.0,
) -> None:  # fmt: skip
    """Train, then write the final weights.

    Args:
        out: folder for the weights.
        kind: ``map``, ``shards`` or ``stream``.
        workers: processes that load ahead.
        in_parts: write even this small state in parts.
        unshared: work in a folder of this worker's own, so that no other worker sees a relative checkpoint folder.
        fault: see ``FaultInjector``.
        slow_s: additional seconds per micro-batch.
    """
    if in_parts:
        manager.SHARD_FROM_BYTES = 0
    if unshared:
        os.chdir(Path(os.environ["HETEROTRAIN_TERMINATION_PATH"]).parent)
        writer.PATIENCE_S = 0.0
    injector = FaultInjector(fault)
    job = heterotrain.init()
    model = job.wrap(net())
    optimizer = job.optimizer(optimizer_of(model))
    install_faults(injector)
    dataset: Any = {"map": PROBLEM, "shards": shards(), "stream": Stream()}[kind]
    for step in job.steps(dataset, workers=workers):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                time.sleep(slow_s)
                step.backward(((model(x) - y) ** 2).mean())
            injector.at("backward", step.number)
            step.apply(optimizer)
            injector.at("applied", step.number)
    torch.save(model.state_dict(), f"{out}/{os.environ['HETEROTRAIN_WORKER']}.pt")


def example(*, out: str, path: str, arguments: list[str]) -> None:
    """Run an example's script like a program; its reports go to the output."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
