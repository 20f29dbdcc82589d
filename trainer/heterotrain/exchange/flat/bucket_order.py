"""The order of parameters in the buckets: that in which gradients arrive, agreed by all ranks.

A bucket leaves when it is complete and all before it have left. At first they are cut from the last registered layer
to the first one, as in DistributedDataParallel. A model that registers its layers in another order than it computes
them would send nothing before the end of backward. So after the first step with these parameters, the lowest rank that
has seen gradients arrive tells all others the order, and they cut the buckets again. Where buckets leave in order as
they are, nothing changes.

Positions are indices into ``model.parameters()``. A formation starts with the order of its lowest rank that has one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from heterotrain.network.group import Group

_P = TypeVar("_P")

KEEP = -1.0
"""Sent in place of the length of an order: the buckets leave in order as they are."""


def arrange(trainable: Sequence[_P], place_of: Mapping[int, int]) -> list[_P]:
    """Return parameters as they go into buckets: by their place, then from the last registered to the first one.

    Args:
        trainable: in the order of registration.
        place_of: place in the order of arrival, by ``id``.
    """
    pairs = sorted(enumerate(trainable), key=lambda pair: (place_of.get(id(pair[1]), len(place_of)), -pair[0]))
    return [parameter for _, parameter in pairs]


def leave_in_order(buckets: Iterable[Iterable[int]], arrived: Sequence[int]) -> bool:
    """Return whether no bucket is complete before one that leaves earlier.

    Args:
        buckets: positions of the parameters in each bucket, in the order in which buckets leave.
        arrived: positions in the order in which gradients arrived; a bucket with another one is complete at the end.
    """
    place_of = {position: place for place, position in enumerate(arrived)}
    complete = [max(place_of.get(position, len(arrived)) for position in bucket) for bucket in buckets]
    return all(one <= other for one, other in pairwise(complete))


def share_order(group: Group, own: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the order of the lowest rank that has one; ``None`` where no rank has, or that rank keeps its buckets.

    Args:
        group: the formation's connections; every rank has to call this.
        own: this rank's order; empty if it has none, ``None`` if it keeps its buckets.

    Raises:
        PeerLost: the group is broken.
    """
    rows = group.gather_now([KEEP if own is None else float(len(own))])
    source = next((rank for rank, (length,) in enumerate(rows) if length), None)
    if source is None or rows[source][0] == KEEP:
        return None
    sent = array("i", own or ()).tobytes() if group.rank == source else None
    size_bytes = int(rows[source][0]) * array("i").itemsize
    return tuple(array("i", group.broadcast_bytes(sent, size_bytes=size_bytes, source=source)))
