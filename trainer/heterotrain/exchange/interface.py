"""How the gradients of members meet: a rank fills buckets in its backward passes, and an exchange adds them up.

``Gradients`` is this rank's side: it moves gradients into buckets, keeps the script from changing them before they are
sums, and computes with the sums. ``Reducer`` is that of whole models, ``PieceReducer`` that of pieces of a model, where
each bucket has owners of its own. ``Exchange`` is the way between ranks. Both belong to one job and outlive formations.

In a step's last backward pass the order is ``begin``, ``start`` of each bucket, ``finish``; after a loss, ``abandon``
in place of ``finish``. Buckets start in the same order on all of their owners, in whatever order they are complete.
"""
# ruff: noqa: ARG002, D102  # Reducer documents the members of Gradients; some do nothing for pieces

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from heterotrain.exchange.gate import Gate
from heterotrain.exchange.script_hooks import ScriptHooks
from heterotrain.exchange.timeline import ReductionTimestamps, Timeline
from heterotrain.network.group import Group


@dataclass(slots=True, eq=False, kw_only=True)
class Bucket:
    """Gradients that are added up together.

    Attributes:
        flat: the buffer that holds them, one dimension.
        owners: the ranks, ascending, that add it up, this one included; ``None`` for all ranks.
        missing: parameters without a gradient so far in the current backward pass.
        is_complete: whether it holds all gradients of the current backward pass.
        is_finite: whether every element of the sum is finite; ``None`` until that is known.
    """

    flat: torch.Tensor
    owners: tuple[int, ...] | None = None
    missing: int = 0
    is_complete: bool = False
    is_finite: bool | None = None


class Exchange(Protocol):
    """Adds up buckets over their owners.

    Attributes:
        is_exact: whether each sum is that of the gradients up to the rounding of their own format.
        is_held: whether buckets wait for ``release``: the first time in a formation, and with other buckets. A sum of
            buckets that differ between ranks would hang, or end the process inside torch.
        started: number of buckets that have been started in this pass.
        bytes_sent: handed to sums with other ranks, until a committed step takes the count.
        timestamps: of the newest pass.
        timeline: of the device that holds the first bucket.
    """

    is_exact: bool
    is_held: bool
    started: int
    bytes_sent: int
    timestamps: ReductionTimestamps
    timeline: Timeline

    def use(self, buckets: Sequence[Bucket], timeline: Timeline) -> None:
        """Add up these buckets from now on, in their order."""

    def begin(self, group: Group | None) -> None:
        """Begin a step's last backward pass in a formation (``None``: no peers)."""

    def start(self, bucket: Bucket) -> None:
        """Add up a complete bucket as soon as all before it have been started."""

    def release(self) -> None:
        """Start the buckets that were held, now that all ranks are known to have the same ones."""

    def finish(self) -> Iterable[Bucket]:
        """Yield each bucket when its sum is there; on an accelerator, the current stream waits for it.

        Raises:
            PeerLost: the group is broken.
        """

    def abandon(self) -> None:
        """Drop a failed pass; waits until its sums have released the buffers (cut the group first)."""

    def transfers_s(self) -> tuple[float, ...]:
        """Return each bucket's seconds on the network in the last pass that has finished; empty if not known."""


class Gradients(Protocol):
    """Sums the gradients of one step after the other. ``Reducer`` documents the members."""

    is_measurable: bool
    exchange: Exchange
    elements: int
    signature: int
    parameters: int
    script_hooks: ScriptHooks

    @property
    def wants_order(self) -> bool:
        return False

    @property
    def buckets(self) -> Sequence[Any]: ...
    @property
    def flats(self) -> list[torch.Tensor]: ...
    @property
    def unused(self) -> int: ...
    def begin(self, *, micro_batches: int = 1) -> None: ...
    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        return

    def watch_buckets(self, on_complete: Callable[[Any], None]) -> None:
        return

    def arm(self, group: Group | None) -> None: ...
    def flush(self) -> None: ...
    def remember(self) -> None: ...
    def check_untouched(self) -> None: ...
    def wait(self) -> None: ...
    def abandon(self) -> None: ...
    def drop_unused(self, unused: int) -> None: ...
    def check_kept(self) -> None: ...
    def take_back(self) -> bool: ...
    def scale(self, factor: float) -> None: ...
    def clamp(self, limit: float) -> None: ...
    def transfers_s(self) -> tuple[float, ...]:
        return ()

    def is_finite(self) -> bool: ...
    def gate(self) -> Gate | None:
        return None

    def first_non_finite(self) -> str | None: ...
    @property
    def known_squared(self) -> float | None: ...
    def squared_norm(self) -> torch.Tensor | float: ...
    def form(self, group: Group) -> None:
        return

    def agree_on_order(self, group: Group) -> None:
        return
