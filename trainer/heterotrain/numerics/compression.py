"""Gradients in half as many bits on the wire.

What a rank adds is rounded once and each partial sum once more, so for W ranks with contributions ``c_i`` and unit
roundoff u (2^-11 for fp16, 2^-8 for bf16) each element of the sum is off by at most about

    W u sum_i |c_i|  +  W 2^-25 / s        (the second term for fp16 only: below its normal range)

fp16 has few exponents, so each bucket is multiplied by a power of two s on the way, chosen from the largest element of
its last sum, which all ranks know alike: that one lands at 2^8 of 2^16. Where nothing is known yet (a formation's first
step), or a sum did not fit after all, the bucket travels in full. So a gradient is never clipped and never lost.
"""

from __future__ import annotations

import math

import torch

LARGEST_AT = 8
"""Exponent of two at which the largest element of a bucket's last sum is put; fp16 ends below 16."""
MOST_EXPONENT = 100

UNCOMPRESSED = "none"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


class Wire:
    """One bucket's way to the other ranks and back; every rank makes the same choices."""

    def __init__(self, compression: str) -> None:
        """``compression`` is ``fp16`` or ``bf16``."""
        self._dtype = DTYPES[compression]
        self._scale: float | None = None if self._dtype is torch.float16 else 1.0

    def pack(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return what travels, as a new tensor; ``None`` when the bucket has to travel in full."""
        if self._scale is None or flat.element_size() <= self._dtype.itemsize:
            return None
        return (flat * self._scale).to(self._dtype) if self._scale != 1.0 else flat.to(self._dtype)

    def unpack(self, packed: torch.Tensor, flat: torch.Tensor) -> bool:
        """Put the sum into ``flat``; ``False``, with ``flat`` as it was, when the sum did not fit."""
        if self._scale is None or not math.isfinite(largest(packed)):
            return False
        flat.copy_(packed)
        if self._scale != 1.0:
            flat.mul_(1.0 / self._scale)
        return True

    def learn(self, flat: torch.Tensor) -> None:
        """Choose the next step's scale from this step's sum."""
        if self._dtype is torch.bfloat16:
            return
        top = largest(flat)
        if not math.isfinite(top) or top == 0.0:
            self._scale = None
            return
        exponent = LARGEST_AT - math.frexp(top)[1]
        self._scale = 2.0 ** max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))


def largest(flat: torch.Tensor) -> float:
    """Return the largest magnitude, the same in whatever order it is sought; not finite when some element is not."""
    if not flat.numel():
        return 0.0
    least, most = torch.aminmax(flat)  # twenty times as fast as torch.linalg.vector_norm(flat, inf) on a CPU
    return float(torch.maximum(-least, most))
