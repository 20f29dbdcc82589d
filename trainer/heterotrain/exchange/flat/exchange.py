"""One all-reduce for each bucket, over its owners: the exact exchange."""

from __future__ import annotations

from heterotrain.exchange.interface import Bucket, Exchange
from heterotrain.network.group import Group
from heterotrain.network.sums import Reduction


class FlatExchange(Exchange):
    """Adds up each bucket as it is."""

    is_exact = True

    def _send(self, bucket: Bucket, group: Group) -> Reduction:
        return self._add_up(bucket.flat, bucket, group)

    def _receive(self, bucket: Bucket, group: Group) -> None:
        """Nothing is left to do: sums are in place."""
