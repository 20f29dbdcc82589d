"""From samples to batches to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """A data set with random access, like ``torch.utils.data.Dataset``."""

    def __len__(self) -> int:
        """Return the samples of one epoch."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``."""


def fetch(dataset: MapDataset, ids: Sequence[int], collate: Collate | None) -> Any:
    """Return the batch of these samples, using one call of ``__getitems__`` if the data set has it.

    Args:
        dataset: a data set with indices.
        ids: indices into it, in the batch's order; at least one.
        collate: makes the batch; ``None`` for torch's own.
    """
    several = getattr(dataset, "__getitems__", None)
    samples = several(list(ids)) if callable(several) else [dataset[i] for i in ids]
    return collated(samples, collate)


def collated(samples: list[Any], collate: Collate | None) -> Any:
    """Return the batch of loaded samples; ``None`` for ``collate`` stands for torch's ``default_collate``."""
    return (collate or default_collate)(samples)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device; copies from page-locked memory are asynchronous.

    Mappings (returned as dictionaries), lists, tuples and named tuples are traversed; other objects stay unchanged.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
