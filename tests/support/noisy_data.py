"""Data sets for loader processes, which must be able to import them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that draw from all three global generators, as augmentations do."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.samples:
            raise IndexError(index)
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002, S311  # the global generators are tested
        return torch.tensor([index, *draws], dtype=torch.float64)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Numbers in an order that differs by epoch, with noise; later epochs are longer."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(self.samples + self.epoch).tolist():
            yield torch.tensor([number, float(torch.rand(())), random.random()], dtype=torch.float64)  # noqa: S311  # the global generators are tested
