"""Computes how much of a training is done, and how many samples are left."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_operator.api.training import Training
from heterotrain_operator.cluster_state.telemetry import MemberGauges


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLeft:
    """What is left of a training.

    Attributes:
        percent: the completed part, from 0 to 100.
        samples: until the end.
    """

    percent: int
    samples: int


def work_left(training: Training, newest: MemberGauges | None) -> WorkLeft | None:
    """Return what is left; ``None`` while the length of an epoch, or the position, is unknown.

    Epochs to come count as long as the present one.
    """
    if newest is None or newest.step is None or min(newest.step, newest.epoch_samples or 0) < 0:
        return None
    if training.steps is not None:
        done, total = newest.step, training.steps
        unit = newest.global_batch_samples or training.base_batch_samples
    else:
        if not newest.epoch_samples or newest.epoch is None:
            return None
        done = newest.epoch * newest.epoch_samples + (newest.cursor_samples or 0)
        total, unit = training.passes * newest.epoch_samples, 1
    done = min(max(done, 0), total)
    return WorkLeft(percent=100 * done // total, samples=(total - done) * max(unit, 1))
