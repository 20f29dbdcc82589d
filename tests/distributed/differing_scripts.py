"""Training scripts whose ranks have different data, as scripts for DistributedDataParallel may."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distributed.scripts import begun, net, problem


class Sharded(torch.utils.data.IterableDataset[Any]):
    """Each second sample, beginning with the rank's own, as ``split_by_node`` would give them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._rank, 96, 2):
            yield problem(96)[index]


class Shorter(torch.utils.data.IterableDataset[Any]):
    """A stream that ends earlier on the second rank."""

    def __init__(self, rank: int) -> None:
        self._samples = 96 - 6 * rank

    def __iter__(self) -> Iterator[Any]:
        yield from (problem(96)[index] for index in range(self._samples))


class Restless(torch.utils.data.Dataset[Any]):
    """Samples with random changes that no seed of the job reaches."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        x, y = problem(96)[index]
        return x * self._random.random(), y


class Unreadable(Sharded):
    """A stream that one rank cannot read."""

    def __iter__(self) -> Iterator[Any]:
        if self._rank:
            raise PermissionError("this host has no credentials")
        return super().__iter__()


def data_of(kind: str, rank: int) -> Any:
    """Return the data of one rank."""
    x, y = problem(96).tensors
    made: dict[str, Any] = {
        "same": lambda: problem(96),
        "order": lambda: torch.utils.data.TensorDataset(x.flip(0), y.flip(0)) if rank else problem(96),
        "length": lambda: problem(96 - 6 * rank),
        "sharded": lambda: torch.utils.data.Subset(problem(96), range(rank, 96, 2)),
        "stream": lambda: Sharded(rank),
        "shorter": lambda: Shorter(rank),
        "rounded": lambda: torch.utils.data.TensorDataset(x + 1e-7 * rank, y),
        "restless": Restless,
        "unreadable": lambda: Unreadable(rank),
    }
    return made[kind]()


def train(*, kind: str, out: str, rank: int | None = None, fault: dict[str, Any] | None = None) -> None:
    """Train one epoch on data of a kind; ``rank`` stands in for torchrun's."""
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    job, model, optimizer, injector = begun(net(), fault, epochs=1, batch_samples=16)
    for step in job.steps(data_of(kind, own), readers="all" if kind == "shorter" else "one"):
        with step:
            injector.at("step", step.number)
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    Path(f"{out}/ended-{own}").touch()
