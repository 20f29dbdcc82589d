"""Sums of numbers over ranks, in place: how the ranks are connected for them, and a sum on its way.

A formation has one topology. The usual one is here: all ranks in one group of torch's. ``exchange/islands`` has the
other.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from heterotrain_core.contract.owners import MOST_OWNER_GROUPS

from heterotrain.errors import UsageError
from heterotrain.network.connection_setup import c10d, make_group
from heterotrain.network.gloo.bounded_wait import BoundedWait, settle
from heterotrain.network.nccl import length_s


class Reduction(ABC):
    """A sum on its way.

    Attributes:
        is_timed: whether ``seconds`` knows how long the sum took, when it has ended.
    """

    is_timed = False

    @abstractmethod
    def wait(self) -> None:
        """Wait for the sum; on an accelerator, the current stream does.

        Raises:
            RuntimeError: it failed, or the formation has been cut.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing uses the buffer any more, after a cut; on an accelerator, the current stream does."""

    @abstractmethod
    def get_future(self) -> Any:
        """Return what takes callbacks, as torch's works do."""

    def seconds(self) -> float | None:
        """Return how long the sum took by its own clock, waits for peers included; ``None`` if that is not known."""
        return None


class Sums(ABC):
    """The connections of some ranks over which they add up numbers."""

    @property
    @abstractmethod
    def nccl_groups(self) -> list[Any]:
        """The groups of torch's whose operations NCCL runs."""

    @abstractmethod
    def start(self, flat: torch.Tensor) -> Reduction:
        """Start to add up ``flat`` (one dimension, of the same length and format on all ranks), in place.

        Raises:
            RuntimeError: the connections are broken.
        """

    def close(self) -> None:  # noqa: B027  # most run in the training thread alone
        """End what runs beside the training thread, after a cut or the last operation."""


class Topology(ABC):
    """How the ranks of a formation are connected for sums.

    Attributes:
        backend: of groups of owners, ``gloo`` or ``nccl``.
    """

    backend: str

    @abstractmethod
    def uses_nccl(self, rank: int) -> bool:
        """Return whether NCCL runs sums on this rank."""

    @abstractmethod
    def connect(self, store: Any, *, rank: int, world_size: int, address: str, is_over: Callable[[], bool]) -> Sums:
        """Connect the ranks; NCCL makes its connections in ``join_nccl``.

        Args:
            store: reached by all ranks.
            rank: this rank.
            world_size: number of ranks.
            address: see ``gloo_device_address``.
            is_over: returns whether the formation has been cut.

        Raises:
            OSError, RuntimeError: a rank did not connect.
        """


@dataclass(frozen=True)
class FlatTopology(Topology):
    """All ranks in one group of torch's."""

    backend: str

    def __str__(self) -> str:
        """Return what carries the sums."""
        return self.backend

    def uses_nccl(self, _rank: int) -> bool:
        """Return whether NCCL is the backend."""
        return self.backend == "nccl"

    def connect(self, store: Any, *, rank: int, world_size: int, address: str, is_over: Callable[[], bool]) -> Sums:
        """Connect all ranks."""
        made = make_group(self.backend, address)(store, "gradients", rank=rank, world_size=world_size)
        return FlatSums(made, is_nccl=self.backend == "nccl", is_over=is_over)


class FlatSums(Sums):
    """Sums in one group of torch's."""

    def __init__(self, group: Any, *, is_nccl: bool, is_over: Callable[[], bool]) -> None:
        """Take over a group.

        Args:
            group: the group.
            is_nccl: whether it is NCCL's.
            is_over: returns whether the formation has been cut.
        """
        self.group = group
        self._is_nccl, self._is_over = is_nccl, is_over

    @property
    def nccl_groups(self) -> list[Any]:
        """The group, if it is NCCL's."""
        return [self.group] if self._is_nccl else []

    def start(self, flat: torch.Tensor) -> Reduction:
        """Start to add up."""
        work = self.group.allreduce([flat], c10d.AllreduceOptions())
        return operation(work, self.group, is_nccl=self._is_nccl, is_over=self._is_over)


def operation(work: dist.Work, group: Any, *, is_nccl: bool, is_over: Callable[[], bool]) -> Reduction:
    """Return an operation of a group of torch's, NCCL's or gloo's, as a reduction."""
    return NcclSum(work) if is_nccl else GlooSum(work, is_over=is_over, belongs_to=group)


class GlooSum(BoundedWait, Reduction):
    """An operation of gloo."""

    def settle(self) -> None:
        """Wait until gloo no longer uses the buffer."""
        settle([self._work], self._group)

    def get_future(self) -> Any:
        """Return what takes callbacks."""
        return self._work.get_future()


class NcclSum(Reduction):
    """An operation of NCCL. It needs no bounded wait: it can be aborted, and waits on the device."""

    is_timed = True

    def __init__(self, work: dist.Work) -> None:
        """Wrap an operation that is queued."""
        self._work = work

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._work.wait()

    def settle(self) -> None:
        """Let the current stream wait for it; the host does not: an aborted operation ends on the device."""
        with contextlib.suppress(RuntimeError):
            self._work.wait()

    def get_future(self) -> Any:
        """Return what takes callbacks."""
        return self._work.get_future()

    def seconds(self) -> float | None:
        """Return the seconds on the device; ``None`` before the end, and without torch's clock for operations."""
        return length_s(self._work)


def owners_to_connect(tuples: Iterable[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """Return the sets of owners that need connections of their own.

    Raises:
        UsageError: there are more than ``MOST_OWNER_GROUPS``.
    """
    every = tuple(range(world_size))
    wanted = [owners for owners in dict.fromkeys(tuples) if len(owners) > 1 and owners != every]
    if len(wanted) > MOST_OWNER_GROUPS:
        raise UsageError(
            f"this division of the model needs {len(wanted)} groups of ranks, and at most {MOST_OWNER_GROUPS} are "
            "possible: divide it in the same way in more of the members"
        )
    return wanted
