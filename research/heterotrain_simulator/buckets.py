"""One step, gradient bucket by gradient bucket: the reference for the two-term model.

The exchange of a bucket starts when every rank has filled it and the exchange of the bucket before it is over. With
``ready_ij = a_i + r_j P_i`` for rank i and bucket j, and ``R_j`` the transfer time of bucket j and all after it, the
step ends at ``max_j (max_i ready_ij + R_j) = max_i max_j (ready_ij + R_j)``: the ranks are separable, whatever the
buckets. Of the inner maximum, the two-term model keeps only the first and the last bucket. It is exact while
``ready + R`` is convex in j, as with equal buckets and linear readiness.

Legend: ``N`` steps, ``W`` ranks, ``K`` buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from heterotrain_core.contract.plan import CommunicationTime
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = 1 * MIB
"""Size of DDP's small first bucket, which starts the exchange early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A ring over equal links.

    Attributes:
        bytes_per_s: rate of a link without protocol overhead.
        latency_s: of one message between neighbours.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def transfer_s(self, size_bytes: Floats, ranks: int) -> Floats:
        """Return seconds for a ring all-reduce: 2 (n - 1) messages of 1 / n of the size; 0 for one rank."""
        hops = 2 * (ranks - 1)
        return hops * (size_bytes / max(ranks, 1) / self.bytes_per_s + self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The buckets of a gradient.

    Attributes:
        size_bytes_K: in the order of exchange.
        ready_K: fraction of backward that has passed when each bucket is full: not decreasing, 1 for the last one.
    """

    size_bytes_K: Floats  # the shape belongs to the name
    ready_K: Floats

    @property
    def gamma(self) -> float:
        """Fraction of backward at the first bucket."""
        return float(self.ready_K[0])


def cut(gradient_bytes: float, *, gamma: float, bucket_bytes: float = 25 * MIB) -> Buckets:
    """Return the buckets of a gradient: a small first one, full ones and the rest, ready at even distances.

    Args:
        gradient_bytes: the whole gradient, more than 0.
        gamma: fraction of backward at the first bucket.
        bucket_bytes: size of a full bucket.
    """
    first = min(FIRST_BUCKET_BYTES, gradient_bytes)
    full, rest = divmod(gradient_bytes - first, bucket_bytes)
    sizes = [first, *([bucket_bytes] * int(full)), *([rest] if rest > 0 else [])]
    ready_K = np.linspace(gamma, 1.0, len(sizes)) if len(sizes) > 1 else np.array([1.0])
    return Buckets(size_bytes_K=np.array(sizes, dtype=float), ready_K=ready_K)


def finish_s(before_NW: Floats, backward_NW: Floats, ready_K: Floats, transfer_s_K: Floats) -> Floats:
    """Return the end of each step's last bucket, ``_N``, in seconds from the begin of the step.

    Args:
        before_NW: seconds before the backward pass that overlaps with the exchange.
        backward_NW: seconds of that backward pass.
        ready_K: fraction of it at which each bucket is full.
        transfer_s_K: seconds of each bucket's exchange.
    """
    end_N: Floats = np.zeros(before_NW.shape[0])
    for ready, transfer_s in zip(ready_K.tolist(), transfer_s_K.tolist(), strict=True):
        all_ready_N = (before_NW + ready * backward_NW).max(axis=1)
        end_N = np.maximum(end_N, all_ready_N) + transfer_s
    return end_N


def alone_s(before: Floats, backward: Floats, ready_K: Floats, transfer_s_K: Floats) -> Floats:
    """Return the end of the step for each rank alone, in seconds; same shape as ``before``."""
    left_K = np.cumsum(transfer_s_K[::-1])[::-1]
    ends = before[..., None] + backward[..., None] * ready_K + left_K
    found: Floats = ends.max(axis=-1)
    return found


def two_terms(buckets: Buckets, transfer_s_K: Floats) -> CommunicationTime:
    """Return the exchange in two terms: T_o for all buckets but the last, T_u for the last; gamma is of the first."""
    return CommunicationTime(
        overlapped_s=float(transfer_s_K[:-1].sum()),
        last_bucket_s=float(transfer_s_K[-1]),
        gamma=buckets.gamma if len(transfer_s_K) > 1 else 0.0,
    )
