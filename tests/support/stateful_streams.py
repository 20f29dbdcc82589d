"""Streams that save and take over their own state, and count the samples that they read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Stateful(torch.utils.data.IterableDataset[torch.Tensor]):
    """Numbers with noise from the global generators; keeps its position, as torchdata's loaders expect it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0
        self.position = 0
        self.reads = 0
        self._next: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["position"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.position, self._next = self._next or 0, None
        while self.position < self.samples:
            number = self.position + 1000 * self.epoch
            self.position += 1
            self.reads += 1
            yield torch.tensor([number, float(torch.rand(())), random.random()], dtype=torch.float64)  # noqa: S311  # the global generators are tested


class Late(Stateful):
    """A wrong one: its state is that before the sample which it has yielded."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"position": max(0, self.position - 1)}


class Buffered(Stateful):
    """Its state leaves out what is in its shuffle buffer, as that of Hugging Face's data sets does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer: list[torch.Tensor] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 8:
                yield buffer.pop(random.randrange(len(buffer)))  # noqa: S311  # the global generators are tested
        yield from buffer


class _Numbers:
    """An iterator with a state of its own."""

    def __init__(self, samples: int, on_read: Callable[[], None]) -> None:
        self._samples = samples
        self._position = 0
        self._on_read = on_read

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self._position == self._samples:
            raise StopIteration
        self._position += 1
        self._on_read()
        return torch.tensor([self._position, float(torch.rand(()))], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"position": torch.tensor(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


class OfIterators:
    """A data set whose iterators have the state."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.reads = 0

    def _count(self) -> None:
        self.reads += 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(_Numbers(self.samples, self._count))


class Stateless:
    """A data set without a state."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.samples):
            self.reads += 1
            yield torch.tensor([number, float(torch.rand(()))], dtype=torch.float64)
