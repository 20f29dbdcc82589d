"""Phases of a training: several loops of one script, each with its own data and its part of the epochs or steps.

The position in the training says which phase it is in, so nothing more is kept: phases follow each other in the order
of the script, and each takes the epochs or steps that it names. A rank that joins or resumes in a later phase passes
through the earlier loops without a step, and restores the state when it has come to the loop of that phase. Whatever
the script does between two loops is then done on all ranks before the state of the phase is there.
"""

from __future__ import annotations

import atexit
import logging
import sys
from dataclasses import dataclass

from heterotrain_core.contract.config import ANY_EPOCHS, TrainingConfig

from heterotrain.data.progress import Progress
from heterotrain.errors import UsageError
from heterotrain.state import admission

_log = logging.getLogger(__name__)
_WHERE = "heterotrain.init, or spec.training of the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPhase:
    """One call of ``job.steps``.

    Attributes:
        number: of the call, from 0.
        last_epoch: epochs of the training after which the phase is over; in the last one, the training is.
        last_step: the same for committed steps, ``None`` where epochs decide or in the last phase. The epoch in
            progress ends there, too.
        is_last: whether the training ends with it.
        is_one_of_several: whether this call or an earlier one takes a part of the training only.
    """

    number: int = 0
    last_epoch: int = ANY_EPOCHS
    last_step: int | None = None
    is_last: bool = True
    is_one_of_several: bool = False

    def has_epoch(self, progress: Progress) -> bool:
        """Return whether the epoch in progress belongs to the phase."""
        by_steps = self.last_step is not None and progress.steps >= self.last_step
        return progress.epoch < self.last_epoch and not by_steps

    def ends_with(self, step: int) -> bool:
        """Return whether the step of this number is the phase's last one by count."""
        return self.last_step is not None and step + 1 >= self.last_step

    def is_past(self, progress: Progress) -> bool:
        """Return whether nothing of the phase is left, hooks included, and another phase follows."""
        return not self.is_last and not self.has_epoch(progress) and progress.evaluated >= progress.epoch

    def may_begin(self, *, is_over: bool, has_phases: bool) -> bool:
        """Return whether there may be anything to train in a new loop; not after ``job.finish`` in an earlier phase.

        Args:
            is_over: whether this process has trained to the end already.
            has_phases: whether the model's part can train other data later (``parts.interface.Part``).

        Raises:
            UsageError: the script has no phases, or ranks hold parts of the model.
        """
        if self.is_one_of_several and not has_phases:
            raise UsageError("phases need ranks that hold the whole model: train a divided one in one job.steps")
        if is_over and not self.is_one_of_several:
            raise UsageError(
                "job.steps was called again after the end of the training, so there is nothing to train: for phases "
                "with other samples, give each call its part, as job.steps(data, epochs=2), and the sum to "
                "heterotrain.init or spec.training"
            )
        return not is_over


class TrainingPhases:
    """The calls of ``job.steps`` so far."""

    def __init__(self, config: TrainingConfig) -> None:
        self._by_steps = config.steps is not None
        self._total = config.epochs if config.steps is None else config.steps
        self._taken = 0
        self._calls = 0
        self._are_several = False
        self._data: object = None

    def begin(self, *, epochs: int | None, steps: int | None) -> TrainingPhase:
        """Return the phase of a new call, which takes so many epochs or steps; without either, all that are left.

        Raises:
            UsageError: the number is not that of a phase of this training.
        """
        unit, other = ("steps", "epochs") if self._by_steps else ("epochs", "steps")
        asked, foreign = (steps, epochs) if self._by_steps else (epochs, steps)
        if foreign is not None:
            raise UsageError(
                f"job.steps({other}={foreign}): this training is by {unit}, so a phase takes {unit}= as well, or give "
                f"{other} to {_WHERE}"
            )
        end = self._total
        if asked is not None:
            end = self._taken + admission.whole_number(f"job.steps: {unit}", asked, least=1)
            self._are_several = True
        if end > self._total:
            raise UsageError(
                f"job.steps({unit}={asked}): the phases up to this one take {end} {unit}, and the whole training has "
                f"{self._total}: give {unit}={end} or more to {_WHERE}"
            )
        if self._calls == 0 and end < self._total:
            atexit.register(self._warn)
        self._taken, self._calls = end, self._calls + 1
        is_last = end == self._total
        return TrainingPhase(
            number=self._calls - 1, last_epoch=ANY_EPOCHS if self._by_steps else end, is_last=is_last,
            last_step=end if self._by_steps and not is_last else None, is_one_of_several=self._are_several,
        )  # fmt: skip

    def check_data(self, data: object, progress: Progress) -> None:
        """Refuse other data in the middle of an epoch: the script has left the loop of the phase before by ``break``.

        Raises:
            UsageError: the epoch has begun with other data.
        """
        before, self._data = self._data, data
        if progress.cursor and before is not None and before != data:
            raise UsageError(
                "the script has left a loop of job.steps in the middle of an epoch, and begins another one with other "
                "data, so samples would be lost and repeated: end a phase by job.steps(…, epochs=) or job.steps(…, "
                "steps=)"
            )

    def _warn(self) -> None:
        """Say at the end of a script without an error that phases are missing."""
        if self._taken < self._total and getattr(sys, "last_value", None) is None:
            unit = "steps" if self._by_steps else "epochs"
            _log.warning(
                "the script has ended after phases of %d of %d %s together: call job.steps once more for the rest, or "
                "give %s=%d to %s", self._taken, self._total, unit, unit, self._taken, _WHERE,
            )  # fmt: skip
