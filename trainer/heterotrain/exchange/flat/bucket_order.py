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

import torch

from heterotrain.exchange.flat.buckets import WholeBucket
from heterotrain.network.group import Group

_P = TypeVar("_P")

KEEP = -1.0
"""Sent in place of the length of an order: the buckets leave in order as they are."""


class BucketOrder:
    """The order of one model's parameters, through formations and steps.

    Attributes:
        positions: positions of parameters in the order in which their gradients arrive, the same on all ranks; empty
            while unknown.
        is_wanted: whether the ranks should agree on it after the next committed step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.positions: tuple[int, ...] = ()
        self.is_wanted = False
        self._model = model

    def arranged(self, trainable: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return parameters, given as the model registers them, as they go into buckets."""
        places = {position: place for place, position in enumerate(self.positions)}
        every = enumerate(self._model.parameters())
        place_of = {id(parameter): places[position] for position, parameter in every if position in places}
        self.is_wanted = self.is_wanted or any(id(parameter) not in place_of for parameter in trainable)
        return arrange(trainable, place_of)

    def form(self, group: Group) -> bool:
        """Start a formation with one order on all ranks; return whether this rank's has changed.

        Raises:
            PeerLost: the group is broken.
        """
        self.is_wanted = True  # ranks do not know what others have tried in earlier formations
        return self._take(share_order(group, self.positions) or ())

    def agree(self, group: Group, buckets: Iterable[WholeBucket], arrived: Iterable[int]) -> bool:
        """Take over the order in which gradients have arrived on the lowest rank that has a share.

        Args:
            group: the formation's connections; every rank has to call this.
            buckets: those of now.
            arrived: parameters by ``id``, in the order in which their gradients have arrived here.

        Returns:
            Whether the order has changed.

        Raises:
            PeerLost: the group is broken.
        """
        self.is_wanted = False
        position_of = {id(parameter): position for position, parameter in enumerate(self._model.parameters())}
        found = [position_of[key] for key in arrived if key in position_of]
        now = [[position_of.get(id(p), -1) for p in bucket.parameters] for bucket in buckets]
        own: Sequence[int] | None = None
        if not found or not leave_in_order(now, found):
            rest = [position for bucket in now for position in bucket if position not in set(found)]
            own = found + rest if found else ()
        return self._take(share_order(group, own) or self.positions)

    def _take(self, positions: tuple[int, ...]) -> bool:
        changed, self.positions = positions != self.positions, positions
        return changed


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
