"""Selects the samples of a step, loads them as micro-batches, and logs the committed ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig

from heterotrain.data import batches
from heterotrain.data.loader_process import Workers
from heterotrain.data.prefetch import Prefetcher, StreamReader
from heterotrain.data.progress import Progress, advance, even_micro_batches, micro_batches
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


class OwnShare(NamedTuple):
    """This rank's part of a batch, and how it is cut: the same from step to step.

    Attributes:
        first: the batch's samples before this rank's first one.
        share_samples, micro_batches, stage, is_joint, rounds, member_samples: as in ``Task``.
    """

    first: int
    share_samples: int
    micro_batches: tuple[int, ...]
    stage: int
    is_joint: bool
    rounds: int
    member_samples: int


def cut_of(active_group: ActiveGroup, shares: tuple[int, ...], cap_samples: int | None) -> OwnShare:
    """Return this rank's part of a batch.

    Args:
        active_group: the formation.
        shares: samples by member.
        cap_samples: the largest micro-batch known to fit; ``None`` for any.
    """
    roster, rank, member, place = active_group.roster, active_group.rank, active_group.member, active_group.place
    start, stop = slice_of_rank(roster, shares, rank)
    of_member = shares[roster.positions[rank]]
    rounds = rounds_of(member, of_member, learned_cap_samples=cap_samples)
    size = micro_batch_samples(member, place.shard, learned_cap_samples=cap_samples)
    cut = even_micro_batches(stop - start, rounds) if rounds else micro_batches(stop - start, size)
    return OwnShare(start, stop - start, cut, place.stage, member.layout.ranks > 1, rounds, of_member)


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
        self._ahead: tuple[tuple[int, int, int], Any] | None = None
        self._cut: tuple[object, OwnShare] | None = None
        self._reported_epoch = self._read_epoch = -1
        self._expected: tuple[ActiveGroup, Progress, int | None] | None = None
        folder = identity.sample_log_dir
        self._log = SampleLog(folder, name=identity.name.replace("/", "-")) if folder else None

    @property
    def epoch_samples(self) -> int | None:
        """Samples of one epoch; ``None`` while unknown."""
        return self._source.samples

    @property
    def is_streamed(self) -> bool:
        """Whether the data set can only be iterated."""
        return self._stream is not None

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

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""
        start, self._read_epoch = task.position + offset, task.epoch
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (task.epoch, start, size):
            batch = ahead[1]
        elif self._prefetcher is None or not task.micro_batches:
            batch = self._source.load(EpochSlice(task.epoch, start, start + size))
        else:
            part = EpochSlice(task.epoch, start, start + size)
            batch = self._prefetcher.take(part, lambda: self._following(task, part))
        return batches.to_device(batch, self._device)

    def load_first(self, task: Task) -> bool:
        """Load the first micro-batch of a step, before the random generators are seeded for it: they need not be kept.

        Returns:
            Whether samples were loaded: not before this process has read some of the epoch, because until then the
            script may still change the data set.
        """
        if self.looks_ahead or self._prefetcher or self._stream or not task.micro_batches:
            return False
        if task.epoch != self._read_epoch:
            return False
        try:
            self._ahead = self._load_ahead(task, keeps_rng=False)
        except Exception:  # noqa: BLE001  # the loop over micro-batches meets it as well, and there it belongs
            return False
        return True

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
            place, batch = self._load_ahead(following, keeps_rng=True)
            self._ahead = place, batches.pinned(batch, self._device)
        except Exception:  # noqa: BLE001  # the next step meets it as well, and there it belongs
            return False
        return True

    def _load_ahead(self, task: Task, *, keeps_rng: bool) -> tuple[tuple[int, int, int], Any]:
        epoch, start, size = place = task.epoch, task.position, task.micro_batches[0]
        return place, self._source.load(EpochSlice(epoch, start, start + size), keeps_rng=keeps_rng)

    def example(self, samples: int) -> Any:
        """Return the first samples of the first epoch as a batch on the device, of which only shapes matter."""
        most = min(samples, self._source.extent(0, 0, samples)[0])
        return batches.to_device(self._source.load(EpochSlice(0, 0, most)), self._device)

    def advanced(self, progress: Progress, task: Task) -> Progress:
        """Return the progress after the commit of the task's step."""
        return advance(progress, batch_samples=task.batch_samples, ends_epoch=task.ends_epoch)

    def committed(self, task: Task, membership: FormationMembership) -> None:
        """Note that the step of the last task is committed."""
        if self._stream is not None:
            self._stream.committed()
        if self._log is not None:
            self.log(task, membership)

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
        shares_of = partial(step_shares, roster, epoch, progress.epoch_steps)
        if self._stream is None:
            batch, ends_epoch = self._source.extent(epoch, cursor, wanted)
        else:
            batch, ends_epoch = self._stream.extent(active_group, progress, wanted, shares_of)
        if self._phase.last_step is not None:
            ends_epoch = ends_epoch or self._phase.ends_with(progress.steps)
        shares = shares_of(batch)
        key = (active_group, roster, shares, cap_samples)
        if self._cut is None or self._cut[0] != key:
            self._cut = key, cut_of(active_group, shares, cap_samples)
        first, share_samples, sizes, stage, is_joint, rounds, member_samples = self._cut[1]
        return Task(
            epoch=epoch, number=progress.steps, batch_samples=batch, ends_epoch=ends_epoch, shares=shares,
            rank=active_group.rank, cursor=cursor, position=cursor + first, share_samples=share_samples,
            global_batch_samples=wanted, micro_batches=sizes, stage=stage, is_joint=is_joint, rounds=rounds,
            member_samples=member_samples, listed=self._source.ids,
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
