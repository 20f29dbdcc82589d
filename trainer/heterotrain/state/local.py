"""This rank's part of a tensor, whether the tensor is whole or divided among the ranks of a member.

``fully_shard`` turns parameters, their gradients and an optimizer's state into ``DTensor``. Of such a tensor a rank
holds some rows of its first dimension, which is one range of elements. The parts can be changed in place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from heterotrain.state.ranges import Holding, TensorRange


def is_divided(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a ``DTensor``; without its module, which takes seconds to load, there is none."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part; of a whole tensor, the tensor itself. Without gradients, and without messages."""
    found: torch.Tensor = tensor._local_tensor if is_divided(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001  # to_local() would be a new object at each call
    return found.detach()


def range_of(name: str, tensor: torch.Tensor) -> TensorRange:
    """Return the elements of the whole tensor, which is called ``name``, that this rank holds.

    Raises:
        ValueError: they are not one range of elements.
    """
    whole = TensorRange(name, 0, tensor.numel())
    if not is_divided(tensor):
        return whole
    divided: Any = tensor
    if divided.device_mesh.ndim != 1:
        raise ValueError(f"a tensor is divided over a mesh of {divided.device_mesh.ndim} dimensions")
    placement = divided.placements[0]
    if placement.is_replicate():
        return whole
    if not placement.is_shard(0):
        raise ValueError(f"a tensor is divided as {placement}, not by its first dimension")
    # get_local_rank() would ask torch's default group
    rank, ranks = divided.device_mesh.get_coordinate()[0], divided.device_mesh.size()
    return TensorRange(name, *shard_of(tensor.shape, rank=rank, ranks=ranks))


def shard_of(shape: torch.Size, *, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first and the end of the elements of one of ``ranks`` under ``fully_shard``, as by ``torch.chunk``.

    Every rank gets the same number of rows, rounded up; the last ones get fewer or none.
    """
    rows, row_elements = shape[0], shape[1:].numel()
    height = -(-rows // ranks)
    return min(rows, rank * height) * row_elements, min(rows, (rank + 1) * height) * row_elements


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


def holding(named: Iterable[tuple[str, torch.Tensor]]) -> Holding:
    """Return what this rank holds of named tensors, such as ``model.named_parameters()``."""
    return {name: range_of(name, tensor) for name, tensor in named}
