"""A gate on the device, between a step's sums and the update that is queued behind them (docs/adr/0053).

It is closed if a sum may be a part, because a communicator was aborted, or if the gradient is not finite. Fused
optimizers leave weights, moments and step counts alone behind a closed one. So the host can queue the update before it
knows how the sums have ended, and learns from the same numbers afterwards whether the update has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from heterotrain.exchange.host_copy import HostCopy
from heterotrain.network.abort_flag import AbortFlag


class PassedGate(NamedTuple):
    """Whether a gate was open, so that what was queued behind it has happened; and the gradient's squared norm."""

    was_open: bool
    squared: float


class Gate:
    """One step's gate; nothing here waits for the device but ``read``.

    Attributes:
        closed: on the device, exactly 0.0 or 1.0: fused kernels subtract it from step counts, and only 1.0 stops them.
        squared: on the device, squared norm of the gradient in float64.
        divisor: on the device, what fused kernels divide gradients by; ``None`` for nothing.
    """

    def __init__(self, flats: Sequence[torch.Tensor], flag: AbortFlag | None) -> None:
        """Queue the gate behind the sums.

        Args:
            flats: the sums, on one device.
            flag: of the formation whose sums they are; ``None`` for a process without peers.
        """
        self._flats, self._versions = flats, [flat._version for flat in flats]  # noqa: SLF001  # torch's own count of changes
        norms = _norms(flats)
        self.squared = torch.dot(norms, norms)
        closed = (self.squared - self.squared).ne_(0.0)  # NaN if not finite; ``isfinite`` would launch four kernels
        if flag is not None:
            closed = torch.maximum(closed, flag.on(closed.device))
        self.closed = closed.float()
        self.divisor: torch.Tensor | None = None
        self._copy = HostCopy(torch.stack((closed, self.squared)))

    @property
    def is_current(self) -> bool:
        """Whether the gradient has not changed since."""
        return [flat._version for flat in self._flats] == self._versions  # noqa: SLF001  # as above

    def clip(self, clip_norm: float) -> None:
        """Limit the norm of the gradient, unless the gate is closed: where kernels can, in the update itself."""
        norm = self.squared.sqrt()
        if all(flat.dtype is not torch.float64 for flat in self._flats):  # the divisor of the kernels is in float32
            self.divisor = (norm / clip_norm).clamp(min=1.0).float()
            return
        factor = (clip_norm / norm).clamp(max=1.0).masked_fill(self.closed > 0, 1.0)
        for flat in self._flats:
            flat.mul_(factor)

    def read(self) -> PassedGate:
        """Wait until the device has passed the gate, and not for what was queued behind it; return what it was."""
        closed, squared = self._copy.numbers()
        return PassedGate(closed == 0.0, squared)


def runs_behind(flats: Sequence[torch.Tensor]) -> bool:
    """Return whether one device adds up while the host goes on: then a gate saves the host from waiting for it."""
    return len({flat.device for flat in flats}) == 1 and flats[0].is_cuda


def _norms(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each tensor, in float64; that of half formats would overflow in them."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for flat in flats:
        by_dtype.setdefault(flat.dtype, []).append(flat)
    found = []
    for dtype, own in by_dtype.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        norms = torch._foreach_norm(own, 2, wide)  # noqa: SLF001  # as torch.nn.utils does
        found.append(torch.stack(norms).double())
    return torch.cat(found) if len(found) > 1 else found[0]
