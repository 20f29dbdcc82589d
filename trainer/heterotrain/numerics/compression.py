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
from heterotrain_core.contract.choices import Compression

LARGEST_AT = 8
"""Exponent of two at which the largest element of a bucket's last sum is put; fp16 ends below 16."""
MOST_EXPONENT = 100
CHUNK_ELEMENTS = 131072
"""Elements: half a MiB in fp32."""

DTYPES = {Compression.FP16: torch.float16, Compression.BF16: torch.bfloat16}
ROUNDOFF = {Compression.FP16: 2.0**-11, Compression.BF16: 2.0**-8}


class Compressor:
    """One bucket's way to the other ranks and back; every rank makes the same choices."""

    def __init__(self, compression: Compression) -> None:
        """``compression`` is any value but ``NONE``."""
        self._dtype = DTYPES[compression]
        self._scale: float | None = None if self._dtype is torch.float16 else 1.0
        self._packed: torch.Tensor | None = None

    def pack(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return what travels, in a tensor that the next call overwrites; ``None`` when the bucket has to travel in full."""
        if self._scale is None or flat.element_size() <= self._dtype.itemsize:
            return None
        if (
            self._packed is None
        ):  # kept: fresh memory is cleared by the system each time, which takes longer than rounding
            self._packed = torch.empty_like(flat, dtype=self._dtype)
        if self._scale == 1.0:
            return self._packed.copy_(flat)
        size = _chunk_elements(flat)
        scratch = flat.new_empty(min(size, flat.numel()))
        for part, place in zip(torch.split(flat, size), torch.split(self._packed, size), strict=True):
            place.copy_(torch.mul(part, self._scale, out=scratch[: part.numel()]))
        return self._packed

    def unpack(self, packed: torch.Tensor, flat: torch.Tensor) -> bool:
        """Put the sum into ``flat``, and choose the next step's scale; ``False``, with ``flat`` as it was, if it did not fit."""
        top = largest(packed)
        if self._scale is None or not math.isfinite(top):
            return False
        if self._scale == 1.0:
            flat.copy_(packed)
        else:
            size = _chunk_elements(flat)
            for part, place in zip(torch.split(packed, size), torch.split(flat, size), strict=True):
                place.copy_(part).mul_(1.0 / self._scale)
        self._choose(top / self._scale)
        return True

    def learn(self, flat: torch.Tensor) -> None:
        """Choose the next step's scale from the sum of a bucket that travelled in full."""
        if self._dtype is torch.float16:
            self._choose(largest(flat))

    def _choose(self, top: float) -> None:
        """Put an element of this magnitude at ``2^LARGEST_AT``; bf16 has the exponents of fp32 and needs no scale."""
        if self._dtype is torch.bfloat16:
            return
        if not math.isfinite(top) or top == 0.0:
            self._scale = None
            return
        exponent = LARGEST_AT - math.frexp(top)[1]
        self._scale = 2.0 ** max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))


def _chunk_elements(flat: torch.Tensor) -> int:
    """Return how many elements are treated at a time: on a CPU what stays in its cache between two passes."""
    return CHUNK_ELEMENTS if flat.is_cpu else max(1, flat.numel())


def largest(flat: torch.Tensor) -> float:
    """Return the largest magnitude, the same in whatever order it is sought; not finite when some element is not."""
    if not flat.numel():
        return 0.0
    least, most = torch.aminmax(flat)  # twenty times as fast as torch.linalg.vector_norm(flat, inf) on a CPU
    return float(torch.maximum(-least, most))
