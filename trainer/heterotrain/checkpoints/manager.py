"""Decides when checkpoints are written and by which rank, and what a cold start restores.

A checkpoint is a set of parts, each written by one rank (``CheckpointManager.write``). Of a state that ranks hold in
parts, every element is written by one of the ranks that hold it. Otherwise the state is the same on every rank. A small
one is a single part, written by the lowest rank on on-demand capacity, else by the lowest. That rank decides alone, by
its own clock. A large state is cut evenly, one part for each rank. The same rank then proposes the checkpoint in the
control vector, so that all ranks copy the state of the same step, and completes it once every part is written. Parts
need a folder that all ranks share: when they do not appear, one rank writes the whole state from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig

from heterotrain.checkpoints import part
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.grace import EXIT_RESERVE_S, WriteEstimate, estimate_write, must_start_now
from heterotrain.checkpoints.kept import HANG_S, KeptCheckpoint, Order
from heterotrain.checkpoints.manifest import Label, new_mark
from heterotrain.checkpoints.restore import ColdStart, job_folder_uri
from heterotrain.checkpoints.schedule import STUCK_S, Schedule
from heterotrain.checkpoints.writer import CheckpointWriter, MissingParts, WriteRequest, WriteResult, writer_among
from heterotrain.clock import Clock
from heterotrain.identity import Identity, Mode
from heterotrain.membership.interface import ActiveGroup
from heterotrain.state.finite import first_non_finite
from heterotrain.state.training import TrainState
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

SHARD_FROM_BYTES = 256 * 1024 * 1024
"""Smaller states are written by one rank, which is faster than coordinating many."""
OWN_PART_S = 10.0
"""Training waits at most so long for an earlier part, which is late, before it leaves out the next one."""
PREPARE_FROM_BYTES = 64 * 1024 * 1024
"""For smaller states, the first copy takes no longer than a later one."""


class WriteReason(Enum):
    """Why a checkpoint is written."""

    DUE = "the interval is over, or a checkpoint was requested"
    HOOKS = "long hooks come next"
    SLOW_STEP = "the running step would end too late"
    VOTED = "all ranks write their parts after the same step"
    ALL_LEAVE = "every rank has to leave, and the job cannot continue without it"
    END = "the training is over"
    LEFT_ALONE = "this rank ends by itself"


LAST = (WriteReason.ALL_LEAVE, WriteReason.END, WriteReason.LEFT_ALONE)
"""After these nothing else is written: ``write`` returns when the checkpoint is complete, or no time is left."""


class CheckpointManager:
    """Decides when this rank writes a checkpoint or its part of one, and restores the newest one."""

    def __init__(
        self, identity: Identity, config: TrainingConfig, *, report: RankMetrics,
        record: Callable[[], bytes | None] = lambda: None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        """Prepare the folder of checkpoints, if there is one.

        ``record`` returns the content of the record file next to the newest checkpoint; ``None`` for no file. ``clock``
        measures limits of waits.
        """
        self._clock = clock
        self._record = record
        self._schedule = Schedule(every_s=config.checkpoint_interval_s, now_s=time.monotonic())
        self._report = report
        self._folder: CheckpointFolder | None = None
        self._cold_start: ColdStart | None = None
        self._writer: CheckpointWriter | None = None
        self._whole_only = False
        self._prepared = False
        self._speed_bytes_per_s: float | None = None
        self._early: Order = (-1, -1, -1)  # of an early checkpoint
        if config.checkpoint_uri is not None:
            self._folder = CheckpointFolder(
                job_folder_uri(config.checkpoint_uri, identity),
                max_to_keep=config.checkpoint_max_to_keep,
                shared=identity.mode is Mode.OPERATED,
            )
            if not identity.rank:  # under torchrun the lowest rank writes, and others may be on other hosts
                self._folder.storage.check_writable()
            self._writer = CheckpointWriter(self._folder, on_done=self._on_done)
            self._cold_start = ColdStart(self._folder, config, identity)
        self.kept = KeptCheckpoint(self._folder, report)

    # -- cold start --------------------------------------------------------------------------------------------------

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best checkpoint that this rank can see, see ``ColdStart.best``."""
        return (-1, -1) if self._cold_start is None else self._cold_start.best()

    def load_into(self, training: TrainState) -> bool:
        """Restore the newest good checkpoint, see ``ColdStart.load_into``; ``False`` when there is none."""
        restored = None if self._cold_start is None else self._cold_start.load_into(training)
        if restored is None:
            return False
        if restored.is_own:
            self.kept.completed(restored.manifest, training.progress.order)
        else:
            self._report.gauges({names.RESUMED_STEP: float(restored.manifest.step)})
        return True

    # -- while training ----------------------------------------------------------------------------------------------

    def request(self) -> None:
        """Request a checkpoint at the next step boundary, from whichever rank is the writer then."""
        self._schedule.request()

    def on_member_lost(self) -> None:
        """Stop waiting for parts of a checkpoint, since those of a lost rank may never come."""
        if self._writer is not None:
            self._writer.stop_waiting_for_parts()

    def proposes(self, active_group: ActiveGroup, training: TrainState, *, before_hooks: bool) -> bool:
        """Return whether all ranks should write their parts after the running step.

        ``before_hooks``: whether long hooks follow, before which there should be a checkpoint.
        """
        writer = self._writer
        if writer is None or not self._is_writer(active_group) or not self._in_parts(active_group, training):
            return False
        return self._is_due() or (before_hooks and writer.running_s is None)

    def outlasts_grace(self, hooks_s: float | None, training: TrainState, *, step_s: float, grace_s: float) -> bool:
        """Return whether hooks that took ``hooks_s`` seconds the last time leave no time for a checkpoint after them.

        Args:
            hooks_s: duration of the hooks' last run, ``None`` before the first one.
            training: the state that would have to be written.
            step_s: duration of the step that follows the hooks.
            grace_s: seconds between SIGTERM and the end of the process.
        """
        if self._writer is None or hooks_s is None:
            return self._writer is not None
        estimate = self._estimate(training, left_s=grace_s - hooks_s - step_s, parts=1)
        return not estimate.fits or hooks_s + step_s >= grace_s

    def write(
        self,
        reason: WriteReason,
        training: TrainState,
        at: ActiveGroup | int,
        *,
        mark: int = 0,
        left_s: float | None = None,
        step_left_s: float = 0.0,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint, if it has one and there is none of this state yet.

        Args:
            reason: why.
            training: the state. In ``SLOW_STEP``, the step has changed nothing of it except the model's buffers.
            at: the formation, or the generation of the last one after this rank has left it.
            mark: random number that names the files of a checkpoint in parts, the same on every rank. Without one, a
                state in parts is not written, because no rank knows which others write theirs.
            left_s: seconds until this process is killed; ``None`` waits for a slow store, not for one that hangs.
            step_left_s: seconds until the running step is likely to be committed.
            buffers: the model's buffers as they were before the running step.

        Raises:
            PeerLost: the group broke meanwhile, at the end of the training.
        """
        writer, formation = self._writer, at if isinstance(at, ActiveGroup) else None
        if writer is None or not training.has_state:
            return
        if reason is WriteReason.DUE and formation is not None and not self._is_due_after(writer, formation, training):
            return
        if reason is WriteReason.END and formation is not None:
            mark = self._agreed_mark(formation, training)
        request = self._request(reason, training, at, mark)
        if request is None:
            return
        if reason in LAST:
            self._write_last(reason, training, request, left_s)
            if reason is WriteReason.END and request.count > 1 and request.completes:
                self.write(WriteReason.LEFT_ALONE, training, request.label.generation)  # if parts of others are missing
        elif self._is_wanted(reason, writer, training, left_s=left_s or 0.0, step_left_s=step_left_s):
            self._start(training, request, buffers)

    def is_due(self, at: ActiveGroup, training: TrainState) -> bool:
        """Look after the writer between two steps; return whether ``write`` would begin a checkpoint that is due."""
        return (own := self._writer) is not None and self._is_due_after(own, at, training) and self._is_writer(at)

    def _is_due_after(self, writer: CheckpointWriter, formation: ActiveGroup, training: TrainState) -> bool:
        """Look after the writer between two steps; return whether the interval is over, or there is a request."""
        self._log_if_stuck(writer)
        self._prepare(writer, formation, training)
        if not self._is_writer(formation):
            self._schedule.cancel_request()
        return self._is_due()

    def _is_wanted(
        self, reason: WriteReason, writer: CheckpointWriter, training: TrainState, *, left_s: float, step_left_s: float
    ) -> bool:
        """Return whether a write is to begin while training goes on; at most a part waits for one that still runs."""
        order, step = training.progress.order, training.progress.steps
        if reason is WriteReason.VOTED:
            if writer.wait(OWN_PART_S):
                return True
            _log.error("this rank leaves out its part of step %d: an earlier one is not written", step)
            return False
        if writer.running_s is not None or (reason is not WriteReason.DUE and order == self.kept.order):
            return False
        if reason is WriteReason.SLOW_STEP:
            estimate = self._estimate(training, left_s=left_s, parts=1)
            if order == self._early or not must_start_now(estimate, left_s=left_s, step_left_s=step_left_s):
                return False
            self._early = order
            _log.warning("the running step would end too late for a checkpoint: writing one now; %s", estimate.reason)
        return True

    def _write_last(
        self, reason: WriteReason, training: TrainState, request: WriteRequest, left_s: float | None
    ) -> None:
        """Write a checkpoint after which nothing else is written, as far as there is time."""
        reserve_s = EXIT_RESERVE_S if reason is WriteReason.ALL_LEAVE else 0.0
        end_s = None if left_s is None else self._clock() + left_s - reserve_s

        def rest_s() -> float | None:
            return None if end_s is None else end_s - self._clock()

        if not self.wait(rest_s()):
            return
        if reason is WriteReason.ALL_LEAVE:
            estimate = self._estimate(training, left_s=(rest_s() or 0.0) + reserve_s, parts=request.count)
            if not estimate.fits and self._early[0] >= 0:
                _log.warning(
                    "all ranks leave: %s; the checkpoint of step %d stays the newest", estimate.reason, self._early[0]
                )
                return
            if estimate.fits:
                _log.info("all ranks leave: %s", estimate.reason)
            else:
                anyway = "writing it anyway, but the job may continue from an older checkpoint"
                _log.warning("all ranks leave: %s; %s", estimate.reason, anyway)
        if request.count > 1 or not self.kept.has(training.progress.order, within_s=rest_s()):
            self._start(training, request)
            self.wait(rest_s())

    def _agreed_mark(self, formation: ActiveGroup, training: TrainState) -> int:
        """Return the mark of a checkpoint in parts of the final state; 0 where one rank writes it, or it is there.

        A rank may have found that the folder is not shared, and writes no parts any more, without the others.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        roster = formation.roster
        writer = writer_among(roster.plan, roster.plan_ranks)
        if formation.group is None or writer is None:
            return 0
        own = 0.0 if self.kept.order == training.progress.order else float(new_mark())
        rows = formation.group.gather_now([own, float(self._in_parts(formation, training))])
        return int(rows[roster.plan_ranks.index(writer)][0]) if all(in_parts for _, in_parts in rows) else 0

    def _request(
        self, reason: WriteReason, training: TrainState, at: ActiveGroup | int, mark: int
    ) -> WriteRequest | None:
        """Return this rank's part of a checkpoint; ``None`` if it has none. A whole state is the part of one rank."""
        formation = at if isinstance(at, ActiveGroup) else None
        if reason in (WriteReason.VOTED, WriteReason.END):  # all ranks have agreed on it
            in_parts = bool(mark)
        else:
            in_parts = formation is not None and self._in_parts(formation, training)
        completes = formation is None or self._is_writer(formation)
        if (in_parts and not mark) or (not in_parts and (training.holdings or not completes)):
            return None
        generation = at.roster.formation.generation if isinstance(at, ActiveGroup) else at
        step, *hooks = training.progress.order
        return WriteRequest(
            label=Label(generation=generation, step=step, mark=mark if in_parts else new_mark()),
            index=formation.rank if formation is not None and in_parts else 0,
            count=len(formation.roster.plan_ranks) if formation is not None and in_parts else 1,
            completes=completes,
            hooks=(hooks[0], hooks[1]),
            record=self._record() if completes else None,
            holdings=training.holdings,
        )

    def missing(self, training: TrainState, at: ActiveGroup | None = None) -> str:
        """Return why there is no complete checkpoint of the present state, for users; empty if there is one.

        Where it is known ``at`` which formation, only the rank that completes checkpoints says so.
        """
        if self._writer is None or not training.has_state or (at is not None and not self._is_writer(at)):
            return ""
        idle_s = None if self._writer.running_s is None else self._writer.idle_s
        return self.kept.missing(training.progress.order, idle_s)

    def wait(self, within_s: float | None = None) -> bool:
        """Wait until nothing is being written; return whether nothing is.

        Args:
            within_s: limit in seconds; ``None`` waits for a slow store, but not for one that hangs (``HANG_S``).
        """
        writer = self._writer
        if writer is None:
            return True
        if within_s is not None:
            end_s, left_s = self._clock() + within_s, within_s
            while not (done := writer.wait(max(0.0, left_s))) and left_s > 0:
                left_s = end_s - self._clock()
            if not done:
                _log.warning("no time is left for the checkpoint being written: the job may use an older one")
            return done
        while not writer.wait(max(0.0, min(STUCK_S, HANG_S - writer.idle_s))):
            self._log_if_stuck(writer)
            if writer.idle_s >= HANG_S:
                _log.error("the checkpoint store did nothing for %.0f s: it is not waited for", writer.idle_s)
                return False
        return True

    # -- small things ------------------------------------------------------------------------------------------------

    def _prepare(self, writer: CheckpointWriter, active_group: ActiveGroup, training: TrainState) -> None:
        """Allocate memory for the first checkpoint, once, after the first step: optimizers have their state then."""
        if self._prepared or training.progress.steps == 0:
            return
        self._prepared = True
        size_bytes = training.size_bytes()
        parts = len(active_group.roster.plan_ranks) if self._in_parts(active_group, training) else 1
        if size_bytes >= PREPARE_FROM_BYTES and not training.holdings and (parts > 1 or self._is_writer(active_group)):
            index = active_group.rank if parts > 1 else 0
            pin = torch.cuda.is_initialized()
            writer.prepare(part.size_bytes(part.cut(training.flat(), index, parts)), pin=pin)

    def _is_writer(self, active_group: ActiveGroup) -> bool:
        roster = active_group.roster
        return writer_among(roster.plan, roster.plan_ranks) == roster.plan_ranks[active_group.rank]

    def _is_due(self) -> bool:
        writer = self._writer
        return writer is not None and writer.running_s is None and self._schedule.is_due(time.monotonic())

    def _in_parts(self, active_group: ActiveGroup, training: TrainState) -> bool:
        several = len(active_group.roster.plan_ranks) > 1
        if training.holdings:  # no rank can write everything
            return several
        return several and not self._whole_only and training.size_bytes() >= SHARD_FROM_BYTES

    def _estimate(self, training: TrainState, *, left_s: float, parts: int) -> WriteEstimate:
        size_bytes = training.size_bytes() // parts
        return estimate_write(size_bytes=size_bytes, speed_bytes_per_s=self._speed_bytes_per_s, left_s=left_s)

    def _start(
        self, training: TrainState, request: WriteRequest, buffers: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        if self._writer is not None and self._is_usable(training):
            pause_s = self._writer.start(training.capture(buffers), request)
            self._schedule.started(time.monotonic())
            self._report.gauges({names.CHECKPOINT_PAUSE: pause_s})

    def _is_usable(self, training: TrainState) -> bool:
        """Return whether the weights are finite: others would take the place of an older checkpoint that is good."""
        name = None if training.model is None else first_non_finite(training.layout.named_parameters())
        if name is None:
            return True
        _log.error("no checkpoint of step %d is written: parameter %s is not finite", training.progress.steps, name)
        self._schedule.started(time.monotonic())
        return False

    def _log_if_stuck(self, writer: CheckpointWriter) -> None:
        """Log a write that does not end; training continues."""
        running_s = writer.running_s
        if running_s is not None and self._schedule.should_warn(running_s):
            self._report.count(names.CHECKPOINT_FAILURES)
            _log.error("a checkpoint has been in progress for %.0f s: check whether its store is stuck", running_s)

    def _on_done(self, result: WriteResult) -> None:
        self.kept.failure = result.failure
        if result.failure:
            self._report.count(names.CHECKPOINT_FAILURES)
            self._schedule.failed(time.monotonic(), at_once=result.missing is not MissingParts.NOTHING)
            if result.missing is MissingParts.UNSEEN:
                self._whole_only = True
                _log.warning(
                    "from now on one rank writes everything, if it holds everything: parts need a folder that all "
                    "workers share"
                )
            return
        if result.put_s > 0 and result.size_bytes:
            self._speed_bytes_per_s = result.size_bytes / result.put_s
        if result.manifest is None:
            return
        self.kept.completed(result.manifest, (result.step, *result.hooks))
        self._report.gauges({names.CHECKPOINT_DURATION: result.total_s})
        _log.info("checkpoint of step %d is complete after %.2f s", result.step, result.total_s)
