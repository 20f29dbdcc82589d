"""What the trainer asks of a data set, of whatever kind: so many samples from a place of an epoch on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class EpochSlice:
    """Samples ``[start, stop)`` of an epoch, in its order: what one micro-batch takes.

    Attributes:
        epoch: from 0.
        start: samples of the epoch before it.
        stop: the same for what comes after it; more than ``start``.
    """

    epoch: int
    start: int
    stop: int


class Source(Protocol):
    """An epoch's samples in order."""

    @property
    def samples(self) -> int | None:
        """Samples of one epoch; ``None`` while unknown."""

    @property
    def is_numbered(self) -> bool:
        """Whether a part can be loaded anywhere, by any process."""

    def extent(self, epoch: int, cursor: int, wanted: int) -> tuple[int, bool]:
        """Return how many of the next ``wanted`` samples after ``cursor`` there are, and whether the epoch ends there.

        Args:
            epoch: from 0.
            cursor: committed samples of the epoch.
            wanted: a step's samples over all ranks.

        Raises:
            UsageError: there are none: these are not the data of which ``cursor`` samples were committed.
        """

    def ids(self, epoch: int, start: int, stop: int) -> list[int]:
        """Return the numbers of the epoch's samples ``[start, stop)`` within the data set, for the log of samples."""

    def load(self, part: EpochSlice) -> Any:
        """Return the batch of a part, on the CPU; the same whenever and wherever it is asked for.

        Raises:
            UsageError: the data set returned other samples than were asked for.
        """
