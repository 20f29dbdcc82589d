"""What a step takes from the data: which samples, in which order, cut how; and the log of what was committed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from heterotrain import data
from heterotrain.identity import Identity
from heterotrain.membership import Formed
from heterotrain.progress import Progress, advance, micro_batches, next_batch_samples, permutation, slice_of, step_seed
from heterotrain.roster import micro_batch_samples, step_shares
from heterotrain.sample_log import SampleLog
from heterotrain.standing import Standing
from heterotrain.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where samples come from: the same data set, in the same order, on every rank."""

    dataset: data.MapDataset
    samples: int
    collate: data.Collate | None
    shuffle: bool


class Feed:
    """Turns progress and shares into tasks, and tasks into batches on the device."""

    def __init__(self, source: Source, *, seed: int, device: torch.device, identity: Identity) -> None:
        self._source = source
        self._seed = seed
        self._device = device
        folder = identity.sample_log_dir
        self._log = SampleLog(folder, name=identity.name.replace("/", "-")) if folder else None

    def task(self, formed: Formed, progress: Progress, *, cap_samples: int | None) -> Task:
        """Return this rank's part of the next step; ``cap_samples`` is the largest micro-batch that is known to fit."""
        roster = formed.roster
        batch = next_batch_samples(
            progress, global_batch_samples=roster.plan.global_batch_samples, epoch_samples=self._source.samples
        )
        shares = step_shares(roster, epoch=progress.epoch, epoch_step=progress.epoch_steps, batch_samples=batch)
        start, stop = slice_of(shares, formed.rank)
        order = self._order(progress.epoch)
        ids = tuple(order[progress.cursor + start : progress.cursor + stop].tolist())
        size = micro_batch_samples(formed.member, learned_cap_samples=cap_samples)
        return Task(
            epoch=progress.epoch, number=progress.steps, batch_samples=batch, shares=shares, rank=formed.rank,
            cursor=progress.cursor, ids=ids, spare_id=int(order[progress.cursor]),
            global_batch_samples=roster.plan.global_batch_samples, micro_batches=micro_batches(len(ids), size),
        )  # fmt: skip

    def seed_of(self, task: Task) -> int:
        """Return the seed of this rank's random numbers in a step."""
        start, _ = slice_of(task.shares, task.rank)
        return step_seed(seed=self._seed, epoch=task.epoch, position=task.cursor + start)

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task from its ``offset``-th on, as a batch on the device."""
        ids = task.ids[offset : offset + size]
        return data.to_device(data.fetch(self._source.dataset, ids, self._source.collate), self._device)

    def advanced(self, progress: Progress, task: Task) -> Progress:
        """Return the progress after the task's step is committed."""
        return advance(progress, batch_samples=task.batch_samples, epoch_samples=self._source.samples)

    def log(self, task: Task, standing: Standing) -> None:
        """Write down a committed step, where a log is kept."""
        if self._log is None:
            return
        order = self._order(task.epoch)
        self._log.write({
            "at_s": time.time(), "epoch": task.epoch, "step": task.number, "generation": standing.formation.generation,
            "formation": standing.formation.number, "rank": task.rank, "shares": task.shares, "ids": task.ids,
            "batch_ids": order[task.cursor : task.cursor + task.batch_samples].tolist(),
        })  # fmt: skip

    def _order(self, epoch: int) -> Any:
        source = self._source
        return permutation(seed=self._seed, epoch=epoch, epoch_samples=source.samples, shuffle=source.shuffle)
