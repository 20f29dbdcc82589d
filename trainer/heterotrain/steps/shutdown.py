"""Graceful shutdown: after SIGTERM or SIGINT, or when everything is committed; and the time that is left for it."""

from __future__ import annotations

import logging
import signal
import time
from typing import NoReturn

from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending

from heterotrain.checkpoints.manager import CheckpointManager, WriteReason
from heterotrain.clock import Clock
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.interface import ActiveGroup, Membership
from heterotrain.state.training import TrainState
from heterotrain.steps.ballot import Voting
from heterotrain.steps.columns import AFTER, BEFORE
from heterotrain.termination_message import TerminationMessage

_log = logging.getLogger(__name__)


NOT_KILLED_S = 86_400.0
"""After SIGINT from a terminal nothing but a second one ends the process."""


class Interrupted(SystemExit, KeyboardInterrupt):
    """SIGINT has ended the training; a script that catches ``KeyboardInterrupt`` hears of it, after the checkpoint."""


class Shutdown:
    """The ways out of the loop.

    Attributes:
        leaving: whether this rank leaves after the current step.
        announced: whether the members of the last formation knew that this rank leaves, and took over its state.
        reason: why the script ended the training early; empty if it did not.
        last_steps: committed steps after which it ends then.
        is_requested: whether this process was told to end.
    """

    def __init__(
        self,
        *,
        config: TrainingConfig,
        training: TrainState,
        membership: Membership,
        checkpoints: CheckpointManager,
        termination_message: TerminationMessage,
        operated: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare the ways out.

        ``operated``: whether an operator reads the termination message. Everywhere else the exit code is the only
        answer, so an unfinished training must not end with 0. ``clock`` measures the grace period.
        """
        self._clock = clock
        self.leaving = self.is_requested = False
        self.announced = False
        self.reason = ""
        self.last_steps = 0
        self._requested_s: float | None = None
        self._signal = signal.SIGTERM
        self._grace_s = config.grace_s
        self._committed = f"every {'epoch' if config.steps is None else 'step'} is committed"
        self._training = training
        self._membership = membership
        self._checkpoints = checkpoints
        self._termination_message = termination_message
        self._operated = operated

    def end_after(self, reason: str, *, steps: int) -> None:
        """Note that the script of this rank ends the training after so many committed steps."""
        self.reason, self.last_steps = reason or "the script has ended the training", steps

    def ends(self, steps: int) -> float:
        """Return what this rank votes in a step that would follow so many committed ones (``columns``)."""
        if not self.reason or steps + 1 < self.last_steps:
            return 0.0
        return BEFORE if steps >= self.last_steps else AFTER

    def vote(self, voting: Voting) -> tuple[float]:
        """Return the number of ``ENDS``."""
        return (self.ends(voting.steps) if self.reason else 0.0,)

    def request(self, number: signal.Signals) -> None:
        """Record SIGTERM or SIGINT; safe inside a signal handler."""
        if self._requested_s is None:
            self._requested_s, self._signal = self._clock(), number
            self.is_requested = True
        self.leave_soon()

    def leave_soon(self) -> None:
        """Leave after the current step, without waiting long for other ranks."""
        self.leaving = True
        self._membership.leave_soon(self._grace_s / 3)

    @property
    def left_s(self) -> float | None:
        """Seconds until this process is killed; ``None`` before it was told to end."""
        if self._requested_s is None:
            return None
        waits = self._signal is signal.SIGINT and not self._operated
        return max(0.0, self._requested_s + (NOT_KILLED_S if waits else self._grace_s) - self._clock())

    def write_on_shutdown(self, active_group: ActiveGroup, *, mark: int) -> None:
        """Write a checkpoint because all ranks leave together; without it the job could not continue."""
        left_s = self._grace_s if self.left_s is None else self.left_s
        self._checkpoints.write(WriteReason.ALL_LEAVE, self._training, active_group, mark=mark, left_s=left_s)

    def leave(self, last_membership: FormationMembership | None) -> NoReturn:
        """End this rank after a signal or an announced leave.

        Outside the operator the exit code is that which shells report for a process that the signal has ended.
        """
        if last_membership is not None and not self.announced:
            # The signal came too late for the last vote, or while this rank waited for others. All other ranks may be
            # leaving in the same way, each expected to stay by the others.
            generation = last_membership.formation.generation
            self._checkpoints.write(WriteReason.LEFT_ALONE, self._training, generation, left_s=self.left_s)
        self._checkpoints.wait(self.left_s)
        self._termination_message.write(
            Ending.LEFT,
            f"left on request ({self._signal.name} or drain)",
            told=self.is_requested,
        )
        self._membership.close()
        if self._operated:
            raise SystemExit(0)
        code = 128 + self._signal
        steps = self._training.progress.steps
        _log.warning(
            "%s ended the training early, after %d steps, with exit code %d: %s",
            self._signal.name, steps, code, self._checkpoints.kept.how_to_continue(steps),
        )  # fmt: skip
        raise Interrupted(code) if self._signal is signal.SIGINT else SystemExit(code)

    def leave_early(self, *, generation: int) -> None:
        """Write a checkpoint because the script has left the loop before the end, and say where it is.

        ``generation`` is that of the last formation.
        """
        self._checkpoints.write(WriteReason.LEFT_ALONE, self._training, generation)
        steps = self._training.progress.steps
        how = self._checkpoints.kept.how_to_continue(steps)
        _log.warning("the script has left the training early, after %d steps: %s", steps, how)

    def conclude(self, active_group: ActiveGroup, *, loss: float | None) -> None:
        """End the training together: no rank ends before all ranks have committed everything and it is saved.

        Args:
            active_group: the formation.
            loss: the last finite one; ``None`` if there was none.

        Raises:
            PeerLost: a peer left meanwhile; the remaining ranks may still need this rank's state.
        """
        self._membership.everything_committed()
        self._checkpoints.write(WriteReason.END, self._training, active_group)
        missing = self._checkpoints.missing(self._training, active_group)
        if active_group.group is not None:
            reason = self.reason.encode()
            known = active_group.group.gather_now([float(bool(missing)), float(len(reason))])
            source = next((rank for rank, row in enumerate(known) if row[1]), None)
            if source is not None:  # also on ranks whose scripts did not end the training
                size_bytes = int(known[source][1])
                found = active_group.group.broadcast_bytes(reason, size_bytes=size_bytes, source=source)
                self.reason = found.decode(errors="replace")
            if not missing and any(row[0] for row in known):
                missing = "the checkpoint of the final state is missing: the log of the rank that writes it says why"
        if active_group.rank == 0:
            progress = self._training.progress
            where = self._checkpoints.kept.where_it_is(progress.steps)
            _log.info(
                "the training has ended after %d steps in %d epochs%s: %s%s", progress.steps, progress.epoch,
                "" if loss is None else f", loss {loss:.4g}", self._why, where,
            )  # fmt: skip
        self._end(missing)
        if active_group.group is not None:
            active_group.group.close()

    def finish_alone(self, last_membership: FormationMembership | None) -> None:
        """End a rank that has committed everything and that no other rank needs any more."""
        missing = ""
        if last_membership is not None:
            self._checkpoints.write(WriteReason.LEFT_ALONE, self._training, last_membership.formation.generation)
            missing = self._checkpoints.missing(self._training)
        self._end(missing)

    @property
    def _why(self) -> str:
        return self.reason or self._committed

    def _end(self, missing: str) -> None:
        self._checkpoints.wait()
        self._termination_message.write(Ending.FINISHED, f"{self._why}; {missing}" if missing else self._why)
        self._membership.close()
