"""Selects the samples of a step, loads them as micro-batches, and logs the committed ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig

from heterotrain.data import batches
from heterotrain.data.loader_process import Workers
from heterotrain.data.prefetch import Prefetcher, StreamReader
from heterotrain.data.progress import Progress, advance, even_micro_batches, micro_batches, step_seed
from heterotrain.data.sample_log import SampleLog
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.streamed import Streamed
from heterotrain.identity import Identity
from heterotrain.membership.formation import FormationMembership
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import micro_batch_samples, rounds_of, slice_of_rank, step_shares
from heterotrain.state.training import TrainState
from heterotrain.steps.phases import TrainingPhase
from heterotrain.steps.stream_exchange import StreamExchange
from heterotrain.steps.task import Task
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

LOOK_STEPS = 100
"""The list of upcoming slices ends after this many steps without a sample for this rank."""


class BatchLoader:
    """Turns progress and shares into tasks, and tasks into batches on the device."""

    def __init__(
        self,
        source: Source,
        *,
        config: TrainingConfig,
        device: torch.device,
        identity: Identity,
        report: RankMetrics,
        workers: Workers,
        training: TrainState,
        phase: TrainingPhase,
    ) -> None:
        """Start the processes that load samples ahead; without any, the training process loads them.

        A data set that can only be iterated is read by one process, however many workers there are.

        Raises:
            UsageError: the data set cannot be sent to worker processes.
        """
        self._source = source
        self._stream = StreamExchange(source, training) if isinstance(source, Streamed) else None
        self._config = config
        self._phase = phase
        self._device = device
        self._report = report
        self._prefetcher: Prefetcher | None = None
        if workers.count and isinstance(source, Streamed):
            StreamReader(source, init_fn=workers.init_fn)
            if workers.count > 1:
                _log.info("the data set can only be iterated, so one process reads it instead of %d", workers.count)
        elif workers.count:
            self._prefetcher = Prefetcher(source, workers=workers, pin=device.type == "cuda")
        self.looks_ahead = device.type == "cuda" and self._prefetcher is None and self._stream is None
        self._ahead: tuple[EpochSlice, Any] | None = None
        self._reported_epoch = -1
        self._expected: tuple[ActiveGroup, Progress, int | None] | None = None
        folder = identity.sample_log_dir
        self._log = SampleLog(folder, name=identity.name.replace("/", "-")) if folder else None

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch; ``None`` while unknown."""
        return self._source.samples

    def task(self, active_group: ActiveGroup, progress: Progress, *, cap_samples: int | None) -> Task:
        """Return this rank's part of the next step; ``cap_samples`` is the largest micro-batch known to fit.

        Raises:
            UsageError: this is not the data set with which the training began.
            PeerLost: the group broke while a stream's samples were sent.
        """
        self._expected = (active_group, progress, cap_samples)
        task = self._task(active_group, progress, cap_samples)
        if task.epoch != self._reported_epoch or task.ends_epoch:  # the length of a stream is known only at its end
            samples = self._source.samples
            if samples is not None:
                self._report.gauges({names.EPOCH_SAMPLES: float(samples)})
                self._reported_epoch = task.epoch
        return task

    def seed_of(self, task: Task) -> int:
        """Return the seed for this rank's random numbers in a step."""
        return step_seed(seed=self._config.seed, epoch=task.epoch, position=task.position)

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""
        part = EpochSlice(task.epoch, task.position + offset, task.position + offset + size)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == part:
            batch = ahead[1]
        elif self._prefetcher is None or not task.micro_batches:
            batch = self._source.load(part)
        else:
            batch = self._prefetcher.take(part, lambda: self._following(task, part))
        return batches.to_device(batch, self._device)

    def look_ahead(self, task: Task) -> bool:
        """Load the first micro-batch of the step after ``task``, if the training process loads samples itself.

        Call this while the device computes. After the step, the device would have to wait for the samples.

        Returns:
            Whether samples were loaded. They are dropped if the next step turns out to need others.
        """
        if not self.looks_ahead or self._expected is None:
            return False
        active_group, progress, cap_samples = self._expected
        progress = self.advanced(progress, task)
        if progress.epoch != task.epoch:
            return False  # hooks come first
        try:
            following = self._task(active_group, progress, cap_samples)
            if not following.micro_batches:
                return False
            part = EpochSlice(following.epoch, following.position, following.position + following.micro_batches[0])
            self._ahead = part, batches.pinned(self._source.load(part), self._device)
        except Exception:  # noqa: BLE001  # the next step meets it as well, and there it belongs
            return False
        return True

    def example(self, samples: int) -> Any:
        """Return the first samples of the first epoch as a batch on the device, of which only shapes matter."""
        most = min(samples, self._source.extent(0, 0, samples)[0])
        return batches.to_device(self._source.load(EpochSlice(0, 0, most)), self._device)

    def advanced(self, progress: Progress, task: Task) -> Progress:
        """Return the progress after the commit of the task's step."""
        after = task.cursor + task.batch_samples
        epoch_samples = after if task.ends_epoch else after + 1  # any greater number will do
        return advance(progress, batch_samples=task.batch_samples, epoch_samples=epoch_samples)

    def committed(self) -> None:
        """Note that the step of the last task is committed."""
        if self._stream is not None:
            self._stream.committed()

    def log(self, task: Task, membership: FormationMembership) -> None:
        """Append a committed step to the sample log, if there is one."""
        if self._log is None:
            return
        self._log.write({
            "at_s": time.time(), "epoch": task.epoch, "step": task.number,
            "generation": membership.formation.generation,
            "formation": membership.formation.number, "rank": task.rank, "shares": task.shares,
            "start": task.position - task.cursor, "ids": task.ids,
            "batch_ids": self._source.ids(task.epoch, task.cursor, task.cursor + task.batch_samples),
        })  # fmt: skip

    def _task(self, active_group: ActiveGroup, progress: Progress, cap_samples: int | None) -> Task:
        roster, epoch, cursor = active_group.roster, progress.epoch, progress.cursor
        wanted = roster.plan.global_batch_samples

        def shares_of(batch: int) -> tuple[int, ...]:
            return step_shares(roster, epoch=epoch, epoch_step=progress.epoch_steps, batch_samples=batch)

        if self._stream is None:
            batch, ends_epoch = self._source.extent(epoch, cursor, wanted)
        else:
            batch, ends_epoch = self._stream.extent(active_group, progress, wanted, shares_of)
        ends_epoch = ends_epoch or self._phase.ends_with(progress.steps)
        shares = shares_of(batch)
        start, stop = slice_of_rank(roster, shares, active_group.rank)
        member = active_group.member
        size = micro_batch_samples(member, active_group.place.shard, learned_cap_samples=cap_samples)
        rounds = rounds_of(member, shares[roster.positions[active_group.rank]], learned_cap_samples=cap_samples)
        own = stop - start
        return Task(
            member_samples=shares[roster.positions[active_group.rank]],
            epoch=epoch, number=progress.steps, batch_samples=batch, ends_epoch=ends_epoch, shares=shares,
            rank=active_group.rank, cursor=cursor, position=cursor + start,
            share_samples=stop - start, global_batch_samples=wanted, rounds=rounds,
            micro_batches=even_micro_batches(own, rounds) if rounds else micro_batches(own, size),
            stage=active_group.place.stage, is_joint=member.layout.ranks > 1, listed=self._source.ids,
        )  # fmt: skip

    def _following(self, task: Task, part: EpochSlice) -> Iterator[EpochSlice]:
        """Yield this slice and the following ones of this rank, assuming that neither members nor shares change."""
        if self._expected is None:
            return
        active_group, progress, cap_samples = self._expected
        begin, empty = part.start, 0
        while empty < LOOK_STEPS:
            start = task.position
            for size in task.micro_batches:
                if start >= begin:
                    yield EpochSlice(task.epoch, start, start + size)
                start += size
            empty = 0 if task.micro_batches else empty + 1
            progress, begin = self.advanced(progress, task), 0
            if not self._phase.has_epoch(progress):
                return
            task = self._task(active_group, progress, cap_samples)
