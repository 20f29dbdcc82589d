"""From samples to batches to the device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils.data import default_collate

Collate = Callable[[list[Any]], Any]
_IMAGES: Final = 4
_LAST: Final = torch.channels_last
"""A memory format of tensors with ``_IMAGES`` dimensions."""


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
    if callable(several):
        return collated(several(list(ids)), collate)
    samples = []
    for index in ids:
        try:
            samples.append(dataset[index])
        except Exception as error:
            error.add_note(f"heterotrain: this is sample {index} of {type(dataset).__name__}")
            raise
    return collated(samples, collate)


def collated(samples: list[Any], collate: Collate | None) -> Any:
    """Return the batch of loaded samples; ``None`` for ``collate`` stands for torch's ``default_collate``."""
    return (collate or default_collate)(samples)


def batches_of(parts: Sequence[tuple[int, int]], batch_samples: int) -> Iterator[range]:
    """Yield the numbers of samples in each batch of the first part; every part gives the same number of batches.

    Args:
        parts: of a data set, as ``[start, stop)``; of those of other ranks only the sizes count.
        batch_samples: samples per batch at most. A single part gives full batches and a smaller last one; several give
            batches of nearly equal size, some of them empty where a part has too few samples.
    """
    (start, stop), *others = parts
    if not others:
        for begin in range(start, stop, batch_samples):
            yield range(begin, min(begin + batch_samples, stop))
        return
    count = -(-max(b - a for a, b in parts) // batch_samples)
    for number in range(count):
        yield range(start + (stop - start) * number // count, start + (stop - start) * (number + 1) // count)


def emptied(value: Any) -> Any:
    """Return the batch with no row in any of its tensors; traversed as in ``to_device``."""
    return _mapped(value, lambda tensor: tensor[:0] if tensor.dim() else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device; the host does not wait for what the device has still to do.

    Objects with a method ``to`` move themselves. Mappings, lists, tuples, named tuples and dataclasses are traversed
    and keep their type; other objects stay unchanged.
    """

    def moved(thing: Any) -> Any:
        try:
            return thing.to(device, non_blocking=True)
        except TypeError:  # of a method that takes a device only
            return thing.to(device)

    if device.type == "cpu" and type(value) is tuple:
        for item in value:
            if type(item) is not torch.Tensor or not item.is_cpu:
                break
        else:
            return value  # the usual batch of a rank on a CPU is there already
    return _mapped(pinned(value, device), moved, whole=moved)


def pinned(value: Any, device: torch.device) -> Any:
    """Return a batch for a device: for a GPU with its tensors in page-locked memory, traversed as in ``to_device``.

    A copy from other memory begins when the GPU has finished its earlier work, and the host waits for it. Tensors of
    other layouts and types stay where they are, because torch's copy would change their strides or type.
    """
    return _mapped(value, _pinned) if device.type == "cuda" else value


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if not plain or tensor.requires_grad or not tensor.numel() or tensor.is_pinned():
        return tensor
    is_dense = tensor.is_contiguous() or (tensor.dim() == _IMAGES and tensor.is_contiguous(memory_format=_LAST))
    if is_dense:
        with contextlib.suppress(RuntimeError):  # no page-locked memory is left: the copy takes longer
            return tensor.pin_memory()
    return tensor


def _mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, whole: Callable[[Any], Any] | None = None
) -> Any:
    """Return the value with its tensors changed; ``whole`` changes an object that has a method ``to``."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if whole is not None and not isinstance(value, type) and callable(getattr(value, "to", None)):
        return whole(value)
    if isinstance(value, Mapping):
        return _like(value, {key: _mapped(item, change, whole=whole) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change, whole=whole) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change, whole=whole) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)  # as replace(), but without the checks of a constructor
        for each in dataclasses.fields(value):
            object.__setattr__(found, each.name, _mapped(getattr(value, each.name), change, whole=whole))
        return found
    return value


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other items; a dictionary where its type does not allow that."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    found = copy.copy(value)
    if isinstance(found, UserDict):  # its copy may share the items
        found.data = items
    else:
        found.update(items)
    return found
