"""Tests whether sets of workers meet a deadline, including the time that losses may still cost.

Legend: ``O`` options. The time to the end is ``r / v + k a / n``: the remaining samples ``r`` at ``v`` samples per
second, and for each of ``k`` losses the absence ``a`` of one of ``n`` workers until its successor trains. Losses are
independent by assumption, so their number is a Poisson variable; ``k`` is its mean plus two standard deviations. Where
a whole pool fails at once, that is too little: the model then shows the job late as well, and the job gets other
workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heterotrain_planner.allocate.problem import JobDemand

ABSENCE_S = 600.0
"""Seconds until a lost worker's successor trains: a node has to start, and an image has to arrive."""
DEVIATIONS = 2.0
"""Standard deviations of the number of losses that are planned for beyond the mean."""
MARGIN = 0.10
"""Part of the time that a change has to leave spare: predictions are a few per cent off, and slowness shows late."""
START_S = 60.0
"""Seconds that it has to leave spare as well: new workers start, and near the end a change is not worth its risk."""
LEAST_SAVING = 0.02
"""Least saving of a change to cheaper workers, relative to the price of the current ones for the whole time. Without
it, a job gave its workers back one by one, the last ones for minutes."""
MARGIN_OF_STAYING = 0.02
"""The same for the current workers. The gap between both margins keeps a job from growing and shrinking in turn."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def needed_s(job: JobDemand, *, rate_O: Floats, loss_O: Floats, workers_O: NDArray[np.int64], kept_O: Bools) -> Floats:
    """Return the seconds until the work is done with each option, infinite where it makes no progress.

    Args:
        job: with ``remaining_samples``.
        rate_O: predicted samples per second.
        loss_O: expected losses per second over all workers.
        workers_O: workers.
        kept_O: whether the option is the current set of workers; any other one costs a pause first.
    """
    assert job.remaining_samples is not None  # noqa: S101  # called only for known work
    with np.errstate(divide="ignore"):
        bare_O = job.remaining_samples / (rate_O * job.pace)
    losses_O = loss_O * np.where(np.isfinite(bare_O), bare_O, 0.0)
    many_O = losses_O + DEVIATIONS * np.sqrt(losses_O)
    absent_O = ABSENCE_S / np.maximum(workers_O, 1)
    needed_O: Floats = bare_O + many_O * absent_O + np.where(kept_O, 0.0, job.pause_s)
    return needed_O


def in_time(job: JobDemand, needed_O: Floats, *, kept_O: Bools, dear_O: Floats) -> Bools:
    """Return which options meet the deadline with their margin to spare.

    While the current workers are in time, a change to cheaper ones only saves money. Such an option also has to save
    ``LEAST_SAVING`` of what the current workers cost from the job's creation to the end of its work, otherwise it
    counts as late.

    Args:
        job: with a deadline.
        needed_O: from ``needed_s``.
        kept_O: whether the option is the current set of workers.
        dear_O: price of its workers for an hour; their number where no pool has a price.
    """
    assert job.deadline_s is not None  # noqa: S101  # called only for jobs with a deadline
    until_O = np.where(kept_O, job.deadline_s * (1.0 - MARGIN_OF_STAYING), job.deadline_s * (1.0 - MARGIN) - START_S)
    found_O: Bools = needed_O <= until_O
    if not found_O[kept_O].any():
        return found_O
    now_dear, now_s = float(dear_O[kept_O][0]), float(needed_O[kept_O][0])
    whole_s = job.waited_s + now_s
    with np.errstate(invalid="ignore"):
        saved_O = now_dear * now_s - dear_O * needed_O
    enough_O: Bools = kept_O | (dear_O >= now_dear) | (saved_O >= LEAST_SAVING * now_dear * whole_s)
    return found_O & enough_O
