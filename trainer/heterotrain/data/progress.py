"""The progress of the training, and the selection of the next step's samples.

Sample ``j`` of epoch ``e`` is element ``j`` of its order (``order``). A step takes the next ``B`` samples and divides
them by shares. The only state is (epoch, cursor), so neither a change of membership nor a repeated step can lose or
repeat a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Committed work; the same on every rank after every step.

    Attributes:
        steps: committed steps since the job began.
        samples: committed samples since the job began.
        epoch: current epoch, from 0; equal to the number of epochs when all are done.
        epoch_steps: committed steps of the current epoch.
        cursor: committed samples of the current epoch.
        hooked: committed steps at the last call of hooks that run every few steps; 0 before the first one.
        evaluated: epochs whose end-of-epoch hooks are done.
        stopped: whether the script has ended the training before its last epoch.
        asked_epochs: epochs of the run in which it did so; a run of more epochs goes on. 0 where that is not known.
        asked_steps: the same for steps; 0 where no number of them was asked for.
    """

    steps: int = 0
    samples: int = 0
    epoch: int = 0
    epoch_steps: int = 0
    cursor: int = 0
    evaluated: int = 0
    stopped: bool = False
    hooked: int = 0
    asked_epochs: int = 0
    asked_steps: int = 0

    def is_over(self, *, epochs: int, steps: int | None) -> bool:
        """Return whether nothing is left to train, in a run of so many epochs, or steps."""
        if steps is not None and self.steps >= steps:
            return True
        if self.stopped and not (0 < self.asked_epochs < epochs or 0 < self.asked_steps < (steps or 0)):
            return True
        return self.epoch >= epochs and self.evaluated >= self.epoch

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: of two survivors, the one with the greater value holds the newer state."""
        return (self.steps, self.hooked, self.evaluated)


def advance(progress: Progress, *, batch_samples: int, ends_epoch: bool) -> Progress:
    """Return the progress after the commit of a step.

    Args:
        progress: progress before the step.
        batch_samples: samples of the step over all ranks.
        ends_epoch: whether the epoch ends with it.
    """
    return Progress(  # a constructor takes a third of the time of ``replace``
        steps=progress.steps + 1, samples=progress.samples + batch_samples, epoch=progress.epoch + ends_epoch,
        epoch_steps=0 if ends_epoch else progress.epoch_steps + 1,
        cursor=0 if ends_epoch else progress.cursor + batch_samples,
        evaluated=progress.evaluated, stopped=progress.stopped, hooked=progress.hooked,
        asked_epochs=progress.asked_epochs, asked_steps=progress.asked_steps,
    )  # fmt: skip


def slice_of(shares: tuple[int, ...], position: int) -> tuple[int, int]:
    """Return the slice ``[start, stop)`` of the global batch that belongs to a member, by prefix sums of the shares.

    Args:
        shares: samples by member of the formation.
        position: of the member in it.
    """
    ends = tuple(accumulate(shares))
    return (ends[position] - shares[position], ends[position])


def micro_batches(share_samples: int, micro_batch_samples: int) -> tuple[int, ...]:
    """Cut a share into micro-batches, the remainder first; return their sizes.

    The last one has full size, because only its backward pass overlaps with the exchange of gradients.

    Args:
        share_samples: samples of the share; 0 gives no micro-batches.
        micro_batch_samples: largest micro-batch; 0 keeps the share in one piece.
    """
    if share_samples == 0:
        return ()
    size = min(share_samples, micro_batch_samples) if micro_batch_samples > 0 else share_samples
    remainder = share_samples % size
    return ((remainder,) if remainder else ()) + (size,) * (share_samples // size)


def even_micro_batches(share_samples: int, rounds: int) -> tuple[int, ...]:
    """Cut a share into ``rounds`` micro-batches of nearly equal size, the smaller ones first; return their sizes.

    A share of fewer samples gives fewer micro-batches, of one sample each.
    """
    if share_samples == 0:
        return ()
    count = min(rounds, share_samples)
    ends = [share_samples * number // count for number in range(count + 1)]
    return tuple(sorted(stop - start for start, stop in pairwise(ends)))


@lru_cache(maxsize=8)
def step_seed(*, seed: int, epoch: int, position: int) -> int:
    """Return the seed for a rank's random numbers in one step, in [0, 2^63).

    It depends only on the start of the rank's slice in the epoch. A repeated step therefore draws the same numbers, and
    so does another run with the same shares, whatever the history of its membership.

    Args:
        seed: the job's seed, at least 0.
        epoch: from 0.
        position: samples of the epoch before the slice.
    """
    # numpy's SeedSequence takes six times as long
    return int.from_bytes(blake2b(f"{seed} {epoch} {position}".encode(), digest_size=8).digest(), "little") >> 1


def shared_seed(*, seed: int, steps: int, place: str) -> int:
    """Return the seed for random numbers that all ranks draw alike, in [0, 2^63).

    Args:
        seed: the job's seed, at least 0.
        steps: committed steps.
        place: where in the loop they are drawn, such as ``hooks``.
    """
    text = f"{seed} shared {steps} {place}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
