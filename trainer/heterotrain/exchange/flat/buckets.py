"""Gradient buckets: flat buffers, the parameters in each, and computations over them.

Legend: a flat buffer has one dimension; a view into it has its parameter's shape, strides, device and dtype.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from heterotrain.errors import UsageError
from heterotrain.exchange.interface import Bucket
from heterotrain.state.finite import is_finite, largest
from heterotrain.state.strides import order_of, view_like

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = MIB
"""Size at which the first bucket ends, if that is less than the others': a slow network gets data to carry early."""


@dataclass(slots=True, eq=False, kw_only=True)
class WholeBucket(Bucket):
    """A bucket of whole parameters.

    Attributes:
        parameters: in their order in the buffer.
        views: views into the buffer, each with its parameter's shape and strides.
        version: torch's count of the buffer's changes when it was last known to be in order.
        unused: places of the parameters that got no gradient in the current step on this rank.
        is_finite: whether every element of the sum is finite; ``None`` until that is known.
        pointers: where the views lie in memory.
    """

    parameters: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    version: int = 0
    unused: list[int] = field(default_factory=list)
    is_finite: bool | None = None
    pointers: list[int] = field(init=False)
    _squared: tuple[float, int] = (math.nan, -1)

    def __post_init__(self) -> None:
        self.pointers = [view.data_ptr() for view in self.views]

    def reclaim(self) -> bool:
        """Take back views that a script has pointed elsewhere (``parameter.grad.data = x``), with what they show now.

        Returns:
            Whether there were any.
        """
        found = False
        for place, (view, pointer) in enumerate(zip(self.views, self.pointers, strict=True)):
            if view.data_ptr() != pointer:
                start = sum(p.numel() for p in self.parameters[:place])
                own = view_like(self.flat[start : start + self.parameters[place].numel()], self.parameters[place])
                if view.shape == own.shape:
                    own.copy_(view.detach())
                view.data, found = own, True
        return found

    def take(self) -> bool:
        """Copy gradients outside the buffer into it in one operation, and make the views the parameters' gradients.

        Returns:
            Whether every parameter had a gradient; if not, nothing was copied.
        """
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                return False
            if gradient is not view:
                if gradient.layout is not torch.strided:
                    check_dense(gradient)
                views.append(view)
                gradients.append(gradient)
        if gradients:  # a loop costs twice as much for small layers
            torch._foreach_copy_(views, gradients)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        return True

    def look(self) -> bool:
        """Read the sum once in a step, for whether every element is finite and its squared norm; return the former."""
        if self.is_finite is not None:
            return self.is_finite
        flat = self.flat
        if flat.dtype in (torch.float32, torch.float64):
            squared = torch.dot(flat, flat).item()  # may overflow where every element is finite
            self._squared = squared, flat._version  # noqa: SLF001  # torch's own count of changes
            self.is_finite = math.isfinite(squared) or math.isfinite(largest(flat))
        else:
            self.is_finite = is_finite(flat) if flat.is_floating_point() else True
        return self.is_finite

    @property
    def squared(self) -> float | None:
        """The squared norm as ``look`` has found it; ``None`` if that is not known, or the buffer has changed since."""
        squared, version = self._squared
        return squared if version == self.flat._version else None  # noqa: SLF001  # as above

    def forget(self) -> None:
        """Forget the squared norm, because torch counts no writes to ``parameter.grad.data``."""
        self._squared = math.nan, -1

    def scaled(self, squared: float | None, factor: float) -> None:
        """Take note that the buffer has been multiplied; ``squared`` was its squared norm, if that was known."""
        if squared is not None:
            self._squared = squared * factor * factor, self.flat._version  # noqa: SLF001  # as above

    def complete(self) -> None:
        """Copy gradients outside the buffer into it, and zeros for parameters without a gradient (``unused``)."""
        self.unused.clear()
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not view:
                if parameter.grad is None:
                    self.unused.append(place)
                    view.zero_()
                else:
                    check_dense(parameter.grad)
                    view.copy_(parameter.grad)
                parameter.grad = view


def check_dense(gradient: torch.Tensor) -> None:
    """Refuse a sparse gradient.

    Raises:
        UsageError: it is one.
    """
    if gradient.layout is not torch.strided:
        raise UsageError("a parameter has a sparse gradient: leave out sparse=True, as of F.embedding")


def buckets_of(arranged: Sequence[torch.nn.Parameter], *, enough_bytes: int) -> list[WholeBucket]:
    """Return buckets of these parameters, in their order, that end as soon as they hold ``enough_bytes``.

    DistributedDataParallel uses the same rule. Buckets that stay below a limit would leave a small last one more often:
    with 32 MiB in layers of 4 MiB and a limit of 25 MiB, the last 4 MiB had to wait for 24 MiB sent just before them.
    Backward reaches the last layers first, so their bucket can travel while the rest is still being computed.
    """
    buckets = []
    for parameters in _cut(arranged, FIRST_BUCKET_BYTES, enough_bytes):
        first = parameters[0]
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        views, offset = [], 0
        for parameter in parameters:
            views.append(view_like(flat[offset : offset + parameter.numel()], parameter))
            offset += parameter.numel()
        buckets.append(WholeBucket(flat=flat, parameters=parameters, views=views))
    return buckets


def signature_of(buckets: Sequence[WholeBucket], names: Mapping[int, str]) -> int:
    """Return a checksum of names (by ``id``), shapes, strides and formats of the parameters in the buckets."""
    layout = [
        [
            (names[id(p)], tuple(p.shape), order_of(view), str(p.dtype))
            for p, view in zip(bucket.parameters, bucket.views, strict=True)
        ]
        for bucket in buckets
    ]
    return zlib.crc32(repr(layout).encode())


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """Return the sum of squares of all elements in float64; half formats are summed in fp32.

    On an accelerator this is a tensor, so that nothing waits for the device; on a CPU it is a number, which is faster.
    """
    total: torch.Tensor | float = 0.0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        square = torch.dot(flat, flat)
        total = total + (square.item() if square.is_cpu else square.double())
    return total


def _cut(
    parameters: Sequence[torch.nn.Parameter], first_bytes: int, enough_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Cut the list into runs of one dtype and device that end as soon as they hold ``enough_bytes``.

    The first run ends at ``first_bytes`` if that is less.
    """
    runs: list[list[torch.nn.Parameter]] = []
    used = 0
    for parameter in parameters:
        same = bool(runs) and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or used >= (min(first_bytes, enough_bytes) if len(runs) == 1 else enough_bytes):
            runs.append([])
            used = 0
        runs[-1].append(parameter)
        used += parameter.numel() * parameter.element_size()
    return runs
