"""Tests whether tensors hold only finite numbers, at the cost of reading them once.

A sum is not finite as soon as one of its terms is infinite or NaN. It takes the time of one pass through memory, a
sixtieth of ``torch.isfinite(tensor).all()`` on a CPU. A sum of finite terms may overflow as well, so a sum that is not
finite is followed by an exact test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from heterotrain.state.local import local


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether every element of every tensor is finite; waits for an accelerator at most twice."""
    found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    sums = [tensor.sum() for tensor in found]
    if all(total.is_cpu for total in sums):
        return all(math.isfinite(s.item()) or math.isfinite(largest(t)) for s, t in zip(sums, found, strict=True))
    if math.isfinite(float(torch.stack([total.double().to(sums[-1].device) for total in sums]).sum())):
        return True
    return all(math.isfinite(largest(tensor)) for tensor in found)


def is_finite(flat: torch.Tensor) -> bool:
    """Return whether every element of a floating-point tensor is finite: the fast form of ``all_finite`` for one."""
    return math.isfinite(flat.sum().item()) or math.isfinite(largest(flat))


def largest(flat: torch.Tensor) -> float:
    """Return the largest magnitude, independent of the order of evaluation; not finite if any element is not finite."""
    if not flat.numel():
        return 0.0
    least, most = torch.aminmax(flat)  # twenty times as fast as torch.linalg.vector_norm(flat, inf) on a CPU
    return float(torch.maximum(-least, most))


def first_non_finite(named: Iterable[tuple[str, torch.nn.Parameter]]) -> str | None:
    """Return the name of the first trained parameter with a value that is not finite here; ``None`` if there is none.

    Frozen parameters and buffers are left out: a mask of minus infinities is a constant that a script wants.
    """
    trained = [(name, local(parameter)) for name, parameter in named if parameter.requires_grad]
    if all_finite([parameter for _, parameter in trained]):
        return None
    return next(name for name, parameter in trained if not all_finite([parameter]))
