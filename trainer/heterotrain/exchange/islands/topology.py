"""Which ranks form islands, and which ranks add up between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heterotrain.exchange.islands.sums import IslandSums
from heterotrain.network.connection_setup import make_group
from heterotrain.network.sums import FlatSums, Sums, Topology

BETWEEN = "gloo"
"""The backend between islands: it connects all ranks."""


@dataclass(frozen=True, kw_only=True)
class IslandTopology(Topology):
    """The two levels of a formation.

    Attributes:
        islands: disjoint sets of at least two ranks, each ascending; together fewer than all ranks, or several.
        inner: the backend inside the islands.
    """

    islands: tuple[tuple[int, ...], ...]
    inner: str = "nccl"
    backend = BETWEEN  # owners may lie in several islands

    def __str__(self) -> str:
        """Return what carries the sums."""
        islands = " and ".join(", ".join(map(str, island)) for island in self.islands)
        return f"nccl among ranks {islands}, and by {BETWEEN} to all others"

    def uses_nccl(self, rank: int) -> bool:
        """Return whether a rank is in an island whose backend is NCCL."""
        return self.inner == "nccl" and bool(self.island(rank))

    def island(self, rank: int) -> tuple[int, ...]:
        """Return the island of a rank; empty if it is in none."""
        return next((island for island in self.islands if rank in island), ())

    def heads(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks that add up by gloo, ascending: the head of each island, and all ranks outside islands."""
        others = {rank for island in self.islands for rank in island[1:]}
        return tuple(rank for rank in range(world_size) if rank not in others)

    def connect(self, store: Any, *, rank: int, world_size: int, address: str, is_over: Callable[[], bool]) -> Sums:
        """Connect the ranks."""
        heads, island = self.heads(world_size), self.island(rank)
        between = None
        if rank in heads:
            make = make_group(BETWEEN, address)
            between = make(store, "gradients", rank=heads.index(rank), world_size=len(heads))
        if not island:
            return FlatSums(between, is_nccl=False, is_over=is_over)
        make, name = make_group(self.inner, address), f"island {island[0]}"
        within = make(store, name, rank=island.index(rank), world_size=len(island))
        return IslandSums(within, between, is_nccl=self.inner == "nccl", is_over=is_over)
