"""Training scripts with data sets of all kinds, and with checkpoints in parts."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heterotrain
import torch
from distributed.scripts import begun, net, problem, save
from heterotrain.checkpoints import manager, writer
from heterotrain.data import stream_reading

SAMPLES = 96
PROBLEM = problem(SAMPLES)
Sample = tuple[torch.Tensor, ...]


class Stream(torch.utils.data.IterableDataset[Sample]):
    """The problem's samples as an iterator of unknown length, backwards in odd epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        for index in stream_order(self.epoch):
            yield PROBLEM[index]


class CountedStream(Stream):
    """The stream with a state of its own; writes the place of each sample that it reads to a file."""

    def __init__(self, record: str) -> None:
        super().__init__()
        self.position = 0
        self._next = 0
        self._record = record

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["position"]

    def __iter__(self) -> Iterator[Sample]:
        self.position, self._next = self._next, 0
        for index in stream_order(self.epoch)[self.position :]:
            with Path(self._record).open("a") as file:
                file.write(f"{self.epoch} {self.position}\n")
            self.position += 1
            yield PROBLEM[index]


class StatelessStream(CountedStream):
    """Has no state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]  # as if it had none


@dataclass
class Opaque:
    """A sample that cannot be sent to another rank."""

    values: Sample


class OpaqueStream(CountedStream):
    """Yields objects of a class of its own."""

    def __iter__(self) -> Iterator[Any]:
        return map(Opaque, super().__iter__())


def collate_opaque(samples: list[Opaque]) -> Any:
    """Return the batch of such samples."""
    return torch.utils.data.default_collate([sample.values for sample in samples])


class BrokenStream(CountedStream):
    """Fails in the middle of the second epoch, in a way that another machine would not avoid."""

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__()):
            if self.epoch == 1 and number == 40:
                raise KeyError("a field is missing")
            yield sample


class UnreachableStream(CountedStream):
    """Cannot be read any more from one machine: that of the first worker."""

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__()):
            if self.epoch == 1 and number == 40 and os.environ["HETEROTRAIN_WORKER"] == "w0":
                raise ConnectionError("no route to the store")
            yield sample


def stream_order(epoch: int) -> list[int]:
    """Return the order in which the stream yields the problem's samples."""
    return list(range(SAMPLES))[:: -1 if epoch % 2 else 1]


def opened(shard: int) -> list[Sample]:
    """Return a shard of twelve samples."""
    return [PROBLEM[index] for index in range(12 * shard, 12 * shard + 12)]


def shards() -> heterotrain.Shards[int]:
    """Return the problem in eight shards."""
    return heterotrain.Shards(range(8), [12] * 8, opened)


DATA: dict[str, Any] = {"map": lambda: PROBLEM, "shards": shards, "stream": Stream}


def train(
    *, out: str, kind: str = "map", workers: int = 0, in_parts: bool = False, unshared: bool = False,
    fault: dict[str, Any] | None = None, slow_s: float = 0.0, readers: str = "one",
) -> None:  # fmt: skip
    """Train, then write the final weights.

    Args:
        out: folder for the weights.
        kind: ``map``, ``shards``, ``stream``, or a stream that counts what it reads.
        workers: processes that load ahead.
        in_parts: write even this small state in parts.
        unshared: work in a folder of this worker's own, so that no other worker sees a relative checkpoint folder.
        fault: see ``FaultInjector``.
        slow_s: additional seconds per micro-batch.
        readers: see ``Job.steps``.
    """
    if in_parts:
        manager.SHARD_FROM_BYTES = 0
    if unshared:
        os.chdir(Path(os.environ["HETEROTRAIN_TERMINATION_PATH"]).parent)
        writer.PATIENCE_S = 0.0
    job, model, optimizer, injector = begun(net(), fault)
    stream_reading.STATE_SAMPLES, stream_reading.CHECKED_SAMPLES = 8, 2
    record = f"{out}/reads-{os.environ['HETEROTRAIN_WORKER']}"
    counted: dict[str, type[CountedStream]] = {
        "counted": CountedStream, "stateless": StatelessStream, "opaque": OpaqueStream, "broken": BrokenStream,
        "unreachable": UnreachableStream,
    }  # fmt: skip
    dataset: Any = counted[kind](record) if kind in counted else DATA[kind]()
    collate = collate_opaque if kind == "opaque" else None
    for step in job.steps(dataset, workers=workers, collate=collate, readers=readers):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                time.sleep(slow_s)
                step.backward(((model(x) - y) ** 2).mean())
            injector.at("backward", step.number)
            step.apply(optimizer)
            injector.at("applied", step.number)
    save(model, out)


def example(*, out: str, path: str, arguments: list[str]) -> None:
    """Run an example's script like a program; its reports go to the output."""
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
