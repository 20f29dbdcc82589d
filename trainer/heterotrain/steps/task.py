"""A rank's part of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """This rank's part of one step.

    Attributes:
        epoch: epoch of the step, from 0.
        number: committed steps before it.
        batch_samples: samples of the step over all ranks.
        ends_epoch: whether the epoch ends with it.
        shares: samples by member of the formation.
        member_samples: those of this rank's member.
        rank: this rank in the process group.
        cursor: committed samples of the epoch before it.
        position: the epoch's samples before this rank's first one.
        share_samples: this rank's samples.
        global_batch_samples: the plan's global batch; an epoch's last step may be smaller.
        micro_batches: sizes of the micro-batches into which the share is cut.
        stage: which stage of the member this rank holds; its samples are counted on the first one.
        is_joint: whether other ranks take part in this rank's passes over the model.
        rounds: passes over the model that all ranks of this rank's member make together, more than this rank has
            micro-batches if it has fewer samples; 0 in a member of one rank.
        listed: returns the samples ``[start, stop)`` of an epoch as indices into the data set.
    """

    epoch: int
    number: int
    batch_samples: int
    ends_epoch: bool
    shares: tuple[int, ...]
    member_samples: int
    rank: int
    cursor: int
    position: int
    share_samples: int
    global_batch_samples: int
    micro_batches: tuple[int, ...]
    stage: int = 0
    is_joint: bool = False
    rounds: int = 0
    listed: Callable[[int, int, int], list[int]] = field(repr=False, compare=False)

    def spare(self) -> Task:
        """Return the task of a rank that has no samples but has to run the model."""
        return replace(self, position=self.cursor, share_samples=1, micro_batches=())

    @property
    def shape(self) -> tuple[int, int]:
        """Share and largest micro-batch of the whole member, under which its ranks count the step."""
        largest = -(-self.member_samples // self.rounds) if self.rounds else max(self.micro_batches, default=0)
        return self.member_samples, min(self.member_samples, largest)

    @property
    def ids(self) -> tuple[int, ...]:
        """This rank's samples, as indices into the data set; computed on each access, because it is rarely used."""
        return tuple(self.listed(self.epoch, self.position, self.position + self.share_samples))
