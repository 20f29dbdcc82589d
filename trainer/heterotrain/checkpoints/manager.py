"""When checkpoints are written and by which rank, and what a cold start restores.

A state that ranks hold in parts is written in parts: every element by one of the ranks that hold it. Otherwise the
state is the same on every rank. A small state is then written whole by one rank: the lowest on on-demand capacity, else
the lowest. That rank decides alone, by its own clock. A large state is written in parts, one by each rank. The same
rank then proposes the checkpoint in the control vector, so that all ranks copy the state of the same step, and
completes it once every part is written. Parts need a folder that all ranks share: when they do not appear, one rank
writes the whole state from then on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.uris import redacted

from heterotrain.checkpoints import part
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.grace import EXIT_RESERVE_S, WriteEstimate, estimate_write, must_start_now
from heterotrain.checkpoints.manifest import Label, Manifest, new_mark
from heterotrain.checkpoints.restore import ColdStart, job_folder_uri
from heterotrain.checkpoints.schedule import STUCK_S, Schedule
from heterotrain.checkpoints.storage import answer_within
from heterotrain.checkpoints.writer import CheckpointWriter, MissingParts, WriteRequest, WriteResult, writer_among
from heterotrain.clock import Clock
from heterotrain.data.progress import Progress
from heterotrain.identity import Identity, Mode
from heterotrain.membership.interface import ActiveGroup
from heterotrain.state.finite import first_non_finite
from heterotrain.state.training import TrainState
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

SHARD_FROM_BYTES = 256 * 1024 * 1024
"""Smaller states are written by one rank, which is faster than coordinating many."""
HANG_S = 300.0
"""At the job's end, a store that finishes nothing for so long is not waited for. A slow one is, as long as it takes."""
OWN_PART_S = 10.0
"""Training waits at most so long for an earlier part, which is late, before it leaves out the next one."""
PREPARE_FROM_BYTES = 64 * 1024 * 1024
"""For smaller states, the first copy takes no longer than a later one."""


class CheckpointManager:
    """Decides when this rank writes a checkpoint or its part of one, and restores the newest one."""

    def __init__(
        self, identity: Identity, config: TrainingConfig, *, report: RankMetrics,
        record: Callable[[], bytes | None] = lambda: None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        """Prepare the folder of checkpoints, if there is one.

        Args:
            identity: of this rank.
            config: of the job.
            report: exports what was written.
            record: returns the content of the record file next to the newest checkpoint; ``None`` for no file.
            clock: measures limits of waits.
        """
        self._clock = clock
        self._record = record
        self._schedule = Schedule(every_s=config.checkpoint_interval_s, now_s=time.monotonic())
        self._report = report
        self._folder: CheckpointFolder | None = None
        self._cold_start: ColdStart | None = None
        self._writer: CheckpointWriter | None = None
        self._failure = ""
        self._whole_only = False
        self._prepared = False
        self._speed_bytes_per_s: float | None = None
        self.newest: tuple[int, float] | None = None
        """Step and time, in seconds since 1970, of the newest complete checkpoint that this rank wrote or restored."""
        self._last = self._early = (
            -1,
            -1,
            -1,
        )  # ``Progress.order`` of the last complete checkpoint, and of an early one
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
            self._last = training.progress.order
            self._note_complete(restored.manifest)
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

    def maybe_write(self, active_group: ActiveGroup, training: TrainState) -> None:
        """Start a checkpoint when one is due and this rank writes it whole."""
        if self._writer is None:
            return
        self._log_if_stuck(self._writer)
        self._prepare(self._writer, active_group, training)
        if not self._is_writer(active_group):
            self._schedule.cancel_request()
        elif self._is_due() and not self._in_parts(active_group, training):
            self._start(self._writer, training, generation=active_group.roster.formation.generation)

    def write_before_hooks(self, active_group: ActiveGroup, training: TrainState) -> None:
        """Start a checkpoint that is due because of long hooks, if this rank writes it whole and there is none yet."""
        writer = self._writer
        if writer is None or writer.running_s is not None or self._last == training.progress.order:
            return
        if self._is_writer(active_group) and not self._in_parts(active_group, training):
            self._start(writer, training, generation=active_group.roster.formation.generation)

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

    def write_part(self, active_group: ActiveGroup, training: TrainState, *, mark: int) -> None:
        """Start writing this rank's part of a checkpoint of all ranks; ``mark`` is the same on every rank."""
        if self._writer is None or not self._is_usable(training):
            return
        if not self._writer.wait(OWN_PART_S):
            _log.error(
                "this rank leaves out its part of step %d: an earlier one is not written", training.progress.steps
            )
            return
        roster = active_group.roster
        label = Label(generation=roster.formation.generation, step=training.progress.steps, mark=mark)
        completes = self._is_writer(active_group)
        request = WriteRequest(
            label=label,
            index=active_group.rank,
            count=len(roster.plan_ranks),
            completes=completes,
            hooks=training.progress.order[1:],
            record=self._record() if completes else None,
            holdings=training.holdings,
        )
        self._note_start(self._writer.start_part(training.capture(), request))

    def write_early(
        self,
        active_group: ActiveGroup,
        training: TrainState,
        buffers: Mapping[str, torch.Tensor],
        *,
        left_s: float,
        step_left_s: float,
    ) -> None:
        """Write the state from before the running step now, if there would be no time after the step.

        A state in parts waits for the end of the step, because no rank knows yet which others leave too.

        Args:
            active_group: the formation that the step runs in.
            training: the state. The running step has changed nothing of it except the model's buffers.
            buffers: the model's buffers as they were before the step.
            left_s: seconds until this process is killed.
            step_left_s: seconds until the step is likely to be committed.
        """
        writer = self._writer
        if writer is None or training.progress.order in (self._last, self._early) or writer.running_s:
            return
        if not self._is_writer(active_group) or self._in_parts(active_group, training):
            return
        estimate = self._estimate(training, left_s=left_s, parts=1)
        if must_start_now(estimate, left_s=left_s, step_left_s=step_left_s):
            self._early = training.progress.order
            _log.warning("the running step would end too late for a checkpoint: writing one now; %s", estimate.reason)
            self._start(writer, training, generation=active_group.roster.formation.generation, buffers=buffers)

    # -- at the end --------------------------------------------------------------------------------------------------

    def write_on_shutdown(self, active_group: ActiveGroup, training: TrainState, *, mark: int, left_s: float) -> None:
        """Write the state when every rank has to leave: the job cannot continue without it.

        Returns when this rank has written its part, or when there is no time left.

        Args:
            active_group: the formation whose members all leave.
            training: the state.
            mark: random number that names this checkpoint's files; the same on every rank.
            left_s: seconds until this process is killed.
        """
        if self._writer is None:
            return
        in_parts = self._in_parts(active_group, training)
        if not in_parts and not self._is_writer(active_group):
            return
        began_s = self._clock()
        if not self.wait(left_s - EXIT_RESERVE_S):
            return
        left_s -= self._clock() - began_s
        estimate = self._estimate(training, left_s=left_s, parts=len(active_group.roster.plan_ranks) if in_parts else 1)
        if not estimate.fits and self._early[0] >= 0:
            _log.warning(
                "all ranks leave: %s; the checkpoint of step %d stays the newest", estimate.reason, self._early[0]
            )
            return
        if estimate.fits:
            _log.info("all ranks leave: %s", estimate.reason)
        else:
            _log.warning(
                "all ranks leave: %s; writing it anyway, but the job may continue from an older checkpoint",
                estimate.reason,
            )
        if in_parts:
            self.write_part(active_group, training, mark=mark)
            self.wait(left_s - EXIT_RESERVE_S)
        else:
            self.write_now(
                training, generation=active_group.roster.formation.generation, within_s=left_s - EXIT_RESERVE_S
            )

    def write_final(self, active_group: ActiveGroup, training: TrainState) -> str:
        """Write the final state; on the writer this returns when the checkpoint is complete, or when the store hangs.

        Returns:
            why this rank's checkpoint of it is missing, for users; empty on success and on ranks that complete none.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        if self._writer is not None and active_group.group is not None:
            # A rank may have found that the folder is not shared, and writes no parts any more, without the others.
            own = float(self._in_parts(active_group, training))
            mark = 0.0 if self._last == training.progress.order else float(new_mark())
            rows = active_group.group.gather_now([mark, own])
            writer = writer_among(active_group.roster.plan, active_group.roster.plan_ranks)
            if writer is not None and all(in_parts for _, in_parts in rows):
                agreed = int(rows[active_group.roster.plan_ranks.index(writer)][0])
                if agreed and self.wait():
                    self.write_part(active_group, training, mark=agreed)
                    self.wait()
        if not self._is_writer(active_group):
            return ""
        self.write_now(training, generation=active_group.roster.formation.generation)
        return self.missing(training)

    def missing(self, training: TrainState) -> str:
        """Return why there is no complete checkpoint of the present state, for users; empty if there is one."""
        if self._writer is None or not training.has_state or self._last == training.progress.order:
            return ""
        hangs = self._writer.running_s is not None
        why = f"its store did nothing for {self._writer.idle_s:.0f} s" if hangs else redacted(self._failure)
        newest = f"the newest one is of step {self._last[0]}" if self._last[0] >= 0 else "this process wrote no other"
        return f"the checkpoint of the final state is missing ({why or 'it was not written'}); {newest}"

    def where_it_is(self, steps: int) -> str:
        """Return where the checkpoint of this many steps is, as the end of a sentence; empty without one."""
        if self._folder is None or self.newest is None or self.newest[0] != steps:
            return ""
        return f"; its checkpoint is in {self._folder.storage.shown}"

    def how_to_continue(self, steps: int) -> str:
        """Return where the checkpoint of this many steps is, and how a later run continues from it, for users."""
        if self._folder is None:
            return "nothing is saved without a checkpoint_uri in heterotrain.init, so the next run begins again"
        shown = self._folder.storage.shown
        if self.newest is not None and self.newest[0] == steps:
            return f"its checkpoint is in {shown}, and the same command continues from there"
        return f"the same command continues from the newest checkpoint in {shown}"

    def write_now(self, training: TrainState, *, generation: int, within_s: float | None = None) -> None:
        """Write a whole checkpoint and return when it is complete, unless there already is one of this step.

        Args:
            training: the state; nothing is written while it has none, or while this rank holds a part of it only.
            generation: generation of the formation that reached this state.
            within_s: limit of the wait in seconds; ``None`` waits as ``wait`` does.
        """
        if self._writer is None or not training.has_state or training.holdings:
            return
        end_s = self._clock() + within_s if within_s is not None else None
        if self.wait(within_s) and not self._is_kept(training.progress, within_s=within_s):
            self._start(self._writer, training, generation=generation)
            self.wait(None if end_s is None else end_s - self._clock())

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
        if self._writer is None or self._writer.running_s is not None:
            return False
        return self._schedule.is_due(time.monotonic())

    def _in_parts(self, active_group: ActiveGroup, training: TrainState) -> bool:
        several = len(active_group.roster.plan_ranks) > 1
        if training.holdings:  # no rank can write everything
            return several
        return several and not self._whole_only and training.size_bytes() >= SHARD_FROM_BYTES

    def _estimate(self, training: TrainState, *, left_s: float, parts: int) -> WriteEstimate:
        size_bytes = training.size_bytes() // parts
        return estimate_write(size_bytes=size_bytes, speed_bytes_per_s=self._speed_bytes_per_s, left_s=left_s)

    def _start(
        self,
        writer: CheckpointWriter,
        training: TrainState,
        *,
        generation: int,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if not self._is_usable(training):
            return
        step, *hooks = training.progress.order
        self._note_start(
            writer.start(
                training.capture(buffers),
                generation=generation,
                step=step,
                hooks=(hooks[0], hooks[1]),
                record=self._record(),
            )
        )

    def _is_usable(self, training: TrainState) -> bool:
        """Return whether the weights are finite: others would take the place of an older checkpoint that is good."""
        name = None if training.model is None else first_non_finite(training.layout.named_parameters())
        if name is None:
            return True
        _log.error("no checkpoint of step %d is written: parameter %s is not finite", training.progress.steps, name)
        self._schedule.started(time.monotonic())
        return False

    def _note_start(self, pause_s: float) -> None:
        self._schedule.started(time.monotonic())
        self._report.gauges({names.CHECKPOINT_PAUSE: pause_s})

    def _log_if_stuck(self, writer: CheckpointWriter) -> None:
        """Log a write that does not end; training continues."""
        running_s = writer.running_s
        if running_s is not None and self._schedule.should_warn(running_s):
            self._report.count(names.CHECKPOINT_FAILURES)
            _log.error("a checkpoint has been in progress for %.0f s: check whether its store is stuck", running_s)

    def _on_done(self, result: WriteResult) -> None:
        self._failure = result.failure
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
        self._last = (result.step, *result.hooks)
        self._note_complete(result.manifest)
        self._report.gauges({names.CHECKPOINT_DURATION: result.total_s})
        _log.info("checkpoint of step %d is complete after %.2f s", result.step, result.total_s)

    def _note_complete(self, manifest: Manifest) -> None:
        self.newest = manifest.step, manifest.written_unix_s
        saved = {names.CHECKPOINT_STEP: float(manifest.step), names.CHECKPOINT_TIME: manifest.written_unix_s}
        self._report.gauges(saved)

    def _is_kept(self, progress: Progress, *, within_s: float | None) -> bool:
        """Return whether a checkpoint of this progress is complete, regardless of its writer."""
        if self._folder is None or self._last == progress.order:
            return True
        with contextlib.suppress(Exception):  # any error of a store's library: then it is written once more
            newest = answer_within(HANG_S if within_s is None else max(0.0, within_s), self._folder.newest)
            if newest is not None and (newest.step, *newest.hooks) == progress.order:
                self._last = progress.order
                self._note_complete(newest)
                return True
        return False
