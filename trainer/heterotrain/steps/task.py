"""A rank's part of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What this rank has to do in one step.

    Attributes:
        epoch: epoch of the step, from 0.
        number: committed steps before it.
        batch_samples: samples of the step over all ranks.
        ends_epoch: whether nothing of the epoch is left after it.
        shares: samples by rank.
        rank: this rank in the process group.
        cursor: committed samples of the epoch before it.
        position: where this rank's samples begin in the epoch.
        share_samples: this rank's samples.
        global_batch_samples: the plan's; an epoch's last step may be smaller.
        micro_batches: sizes into which they are cut.
        listed: returns the samples ``[start, stop)`` of an epoch as indices into the data set.
    """

    epoch: int
    number: int
    batch_samples: int
    ends_epoch: bool
    shares: tuple[int, ...]
    rank: int
    cursor: int
    position: int
    share_samples: int
    global_batch_samples: int
    micro_batches: tuple[int, ...]
    listed: Callable[[int, int, int], list[int]] = field(repr=False, compare=False)

    def spare(self) -> Task:
        """Return the task of a rank without samples that has to run the model all the same."""
        return replace(self, position=self.cursor, share_samples=1)

    @property
    def ids(self) -> tuple[int, ...]:
        """This rank's samples, as indices into the data set; listed anew each time, because few ask."""
        return tuple(self.listed(self.epoch, self.position, self.position + self.share_samples))
