"""Compression of gradients on the wire to half as many bits.

Each contribution is rounded once and each partial sum once more. For W ranks with contributions ``c_i`` and unit
roundoff u (2^-11 for fp16, 2^-8 for bf16), the error of each element of the sum is at most about

    W u sum_i |c_i|  +  W 2^-25 / s        (the second term for fp16 only: below its normal range)

fp16 has a small range of exponents, so each bucket is multiplied by a power of two s before it is sent. All ranks
choose s from the largest element of the bucket's last sum, so that this element becomes 2^8 (fp16 ends at 2^16). If no
last sum is known (a formation's first step), or a sum overflowed, the bucket is sent uncompressed. A gradient is never
clipped or lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from heterotrain_core.contract.choices import Compression

from heterotrain.exchange.interface import Bucket, Exchange
from heterotrain.exchange.timeline import Timeline
from heterotrain.network.group import Group
from heterotrain.network.sums import Reduction
from heterotrain.state.finite import largest

LARGEST_AT = 8
"""Exponent of two to which the largest element of a bucket's last sum is scaled; fp16 ends below 16."""
MOST_EXPONENT = 100
CHUNK_ELEMENTS = 131072
"""Elements converted at a time on a CPU, half a MiB in fp32: they stay in its cache between two passes."""

DTYPES = {Compression.FP16: torch.float16, Compression.BF16: torch.bfloat16}
ROUNDOFF = {Compression.FP16: 2.0**-11, Compression.BF16: 2.0**-8}


class CompressedExchange(Exchange):
    """Adds up each bucket in a smaller format; its state is one compressor for each bucket."""

    is_exact = False

    def __init__(self, compression: Compression) -> None:
        """``compression`` is any value but ``NONE``."""
        super().__init__()
        self._compression = compression
        self._compressors: dict[Bucket, Compressor] = {}
        self._packed: dict[Bucket, torch.Tensor] = {}

    def use(self, buckets: Sequence[Bucket], timeline: Timeline) -> None:
        """Add up these buckets from now on, in their order."""
        super().use(buckets, timeline)
        self._renew()

    def begin(self, group: Group | None) -> None:
        """Begin a step's last backward pass in a formation; new members do not have the old one's scales."""
        if group is not self._group:
            self._renew()
        super().begin(group)

    def abandon(self) -> None:
        """Drop a failed pass."""
        super().abandon()
        self._packed.clear()

    def _renew(self) -> None:
        self._compressors = {transfer.bucket: Compressor(self._compression) for transfer in self._transfers}

    def _send(self, bucket: Bucket, group: Group) -> Reduction:
        packed = self._compressors[bucket].pack(bucket.flat)
        if packed is None:
            return self._add_up(bucket.flat, bucket, group)
        self._packed[bucket] = packed
        return self._add_up(packed, bucket, group)

    def _receive(self, bucket: Bucket, group: Group) -> None:
        compressor, packed = self._compressors[bucket], self._packed.pop(bucket, None)
        if packed is not None:
            if compressor.unpack(packed, bucket.flat):
                return
            group.wait(self._add_up(bucket.flat, bucket, group))  # every rank sees the same overflow
        compressor.learn(bucket.flat)


class Compressor:
    """Compresses one bucket for the network and decompresses its sum; every rank makes the same choices."""

    def __init__(self, compression: Compression) -> None:
        """``compression`` is any value but ``NONE``."""
        self._dtype = DTYPES[compression]
        self._scale: float | None = None if self._dtype is torch.float16 else 1.0
        self._packed: torch.Tensor | None = None

    def pack(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the compressed bucket, overwritten by the next call; ``None`` if it has to be sent uncompressed."""
        if self._scale is None or flat.element_size() <= self._dtype.itemsize:
            return None
        if self._packed is None:  # kept, because the system clears fresh memory, which takes longer than rounding
            self._packed = torch.empty_like(flat, dtype=self._dtype)
        if self._scale == 1.0:
            return self._packed.copy_(flat)
        size = _chunk_elements(flat)
        scratch = flat.new_empty(min(size, flat.numel()))
        for part, place in zip(torch.split(flat, size), torch.split(self._packed, size), strict=True):
            place.copy_(torch.mul(part, self._scale, out=scratch[: part.numel()]))
        return self._packed

    def unpack(self, packed: torch.Tensor, flat: torch.Tensor) -> bool:
        """Decompress the sum into ``flat`` and choose the next step's scale.

        Returns:
            Whether the sum fit into the compressed format; if not, ``flat`` is unchanged.
        """
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
        """Choose the next step's scale from the sum of a bucket that was sent uncompressed."""
        if self._dtype is torch.float16:
            self._choose(largest(flat))

    def _choose(self, top: float) -> None:
        """Scale an element of this magnitude to ``2^LARGEST_AT``; bf16 has fp32's exponents and needs no scale."""
        if self._dtype is torch.bfloat16:
            return
        if not math.isfinite(top) or top == 0.0:
            self._scale = None
            return
        exponent = LARGEST_AT - math.frexp(top)[1]
        self._scale = 2.0 ** max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))


def _chunk_elements(flat: torch.Tensor) -> int:
    """Return how many elements to convert at a time."""
    return CHUNK_ELEMENTS if flat.is_cpu else max(1, flat.numel())
