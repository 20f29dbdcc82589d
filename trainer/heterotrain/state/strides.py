"""Memory formats: tensors that belong to a parameter lie in memory as it does.

Fused optimizer kernels walk a parameter, its gradient and its moments by one index into memory. With different strides
they pair the wrong elements on a CPU, and fail on a GPU. DistributedDataParallel keeps to the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each place once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions with more than one element; those of others mean nothing."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def view_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view into a flat buffer with the shape of ``parameter``, and its strides where it is dense.

    Args:
        flat: as many elements as the parameter has, contiguous.
        parameter: the parameter.
    """
    if not is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def laid_out_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``value``, or a copy of it with the strides of ``parameter``, if it has that shape and other strides."""
    if value.shape != parameter.shape or value.stride() == parameter.stride() or not is_dense(parameter):
        return value
    found = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
    return found.copy_(value)


class Strides:
    """The strides of parameters, as they were at one time."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._of = [(parameter, parameter.stride()) for parameter in parameters]

    def have_changed(self) -> bool:
        """Return whether some have changed, as by ``model.to(memory_format=…)``."""
        for parameter, stride in self._of:  # noqa: SIM110  # a comprehension is a call, up to Python 3.11
            if parameter.stride() != stride:
                return True
        return False
