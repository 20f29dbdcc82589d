"""The interface between the trainer and any kind of data set: slices of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class EpochSlice:
    """Samples ``[start, stop)`` of an epoch, in the epoch's order: one micro-batch.

    Attributes:
        epoch: from 0.
        start: samples of the epoch before the slice.
        stop: samples of the epoch up to the slice's end; greater than ``start``.
    """

    epoch: int
    start: int
    stop: int


class Source(Protocol):
    """An epoch's samples in order."""

    @property
    def dataset(self) -> Any:
        """The script's data set."""

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """Makes a batch from a list of samples; ``None`` for torch's own."""

    @property
    def order(self) -> str:
        """The name of the order of samples, which a checkpoint in mid-epoch must share to be continued."""

    @property
    def samples(self) -> int | None:
        """Number of samples in one epoch; ``None`` while unknown."""

    @property
    def is_numbered(self) -> bool:
        """Whether any process can load any slice."""

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many of the next ``wanted`` samples after ``cursor`` there are, and whether the epoch ends there.

        Args:
            epoch: from 0.
            cursor: committed samples of the epoch.
            wanted: a step's samples over all ranks.

        Raises:
            UsageError: there are none, so this is not the data set of which ``cursor`` samples were committed.
        """

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the numbers of the epoch's samples ``[start, stop)`` within the data set, for the sample log."""

    def load(self, part: EpochSlice, *, keeps_rng: bool = True) -> Any:
        """Return the batch of a slice, on the CPU; the same at any time and in any process.

        Args:
            part: the slice.
            keeps_rng: whether the global random generators have their states back afterwards. A caller that seeds them
                next can do without.

        Raises:
            UsageError: the data set returned a wrong number of samples.
        """
