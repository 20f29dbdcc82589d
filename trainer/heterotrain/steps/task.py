"""A rank's part of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
        ids: this rank's samples, as indices into the data set.
        spare_id: a sample of the step, for a rank without any that has to run the model all the same.
        global_batch_samples: the plan's; an epoch's last step may be smaller.
        micro_batches: sizes into which they are cut.
    """

    epoch: int
    number: int
    batch_samples: int
    ends_epoch: bool
    shares: tuple[int, ...]
    rank: int
    cursor: int
    position: int
    ids: tuple[int, ...]
    spare_id: int
    global_batch_samples: int
    micro_batches: tuple[int, ...]

    def spare(self) -> Task:
        """Return the task of a rank without samples that has to run the model all the same."""
        return replace(self, position=self.cursor, ids=(self.spare_id,))

    @property
    def share_samples(self) -> int:
        """This rank's samples."""
        return len(self.ids)
