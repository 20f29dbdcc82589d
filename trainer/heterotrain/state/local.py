"""This rank's part of a tensor, whether the tensor is whole or divided among the ranks of a member.

``fully_shard`` turns parameters, their gradients and an optimizer's state into ``DTensor``. Of such a tensor a rank
holds some rows of its first dimension, which is one range of elements (``Extent``). The parts can be changed in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from heterotrain.state.holdings import Extent


def is_divided(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a ``DTensor``; without its module, which takes seconds to load, there is none."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part; of a whole tensor, the tensor itself. Without gradients, and without messages."""
    found: torch.Tensor = tensor._local_tensor if is_divided(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001  # to_local() would be a new object at each call
    return found.detach()


def elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of the whole tensor."""
    return tensor.numel()


def extent(tensor: torch.Tensor) -> Extent:
    """Return the elements of the whole tensor that this rank holds.

    Raises:
        ValueError: they are not one range of elements.
    """
    if not is_divided(tensor):
        return Extent(0, tensor.numel())
    divided: Any = tensor
    if divided.device_mesh.ndim != 1:
        raise ValueError(f"a tensor is divided over a mesh of {divided.device_mesh.ndim} dimensions")
    placement = divided.placements[0]
    if placement.is_replicate():
        return Extent(0, tensor.numel())
    if not placement.is_shard(0):
        raise ValueError(f"a tensor is divided as {placement}, not by its first dimension")
    # get_local_rank() would ask torch's default group
    return shard_extent(tensor.shape, rank=divided.device_mesh.get_coordinate()[0], ranks=divided.device_mesh.size())


def shard_extent(shape: torch.Size, *, rank: int, ranks: int) -> Extent:
    """Return what one of ``ranks`` holds of a tensor that ``fully_shard`` has divided: by ``torch.chunk``.

    Every rank gets the same number of rows, rounded up; the last ones get fewer or none.
    """
    rows = shape[0]
    row_elements = shape[1:].numel()
    height = -(-rows // ranks)
    return Extent(min(rows, rank * height) * row_elements, min(rows, (rank + 1) * height) * row_elements)


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the parameter's gradient; ``None`` when it has none."""
    found = parameter.grad
    if found is None or not is_divided(found):
        return found
    part: torch.Tensor = found._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001  # the same object each time
    return part


def set_gradient(parameter: torch.Tensor, part: torch.Tensor | None) -> None:
    """Make ``part`` this rank's part of the gradient; later gradients are added to its memory.

    Args:
        parameter: a whole or divided parameter.
        part: of the shape of ``local(parameter)``; ``None`` for no gradient.
    """
    if part is None or not is_divided(parameter):
        parameter.grad = part
        return
    divided: Any = parameter
    spec = divided._spec  # noqa: SLF001  # as FSDP itself; from_local() would make a view of the part
    parameter.grad = sys.modules["torch.distributed.tensor"].DTensor(part, spec, requires_grad=False)


def holding(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Extent]:
    """Return what this rank holds of named tensors, such as ``model.named_parameters()``."""
    return {name: extent(tensor) for name, tensor in named}


def sizes(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the number of elements of each whole tensor, in the same order on every rank."""
    return {name: tensor.numel() for name, tensor in named}


@torch.no_grad()
def fill(tensor: torch.Tensor, stretches: Mapping[Extent, torch.Tensor]) -> None:
    """Copy elements into this rank's part.

    Args:
        tensor: a whole or divided tensor.
        stretches: elements of the whole tensor, flat, by their place in it; what this rank does not hold is ignored.

    Raises:
        ValueError: together they lack elements that this rank holds.
    """
    own, part = extent(tensor), local(tensor).view(-1)
    reached = own.start
    for place, values in sorted(stretches.items()):
        start, stop = max(own.start, place.start), min(own.stop, place.stop)
        if start >= stop:
            continue
        if start > reached:
            break
        part[start - own.start : stop - own.start].copy_(values.view(-1)[start - place.start : stop - place.start])
        reached = max(reached, stop)
    if reached < own.stop:
        raise ValueError(f"elements [{reached}, {own.stop}) are missing")
