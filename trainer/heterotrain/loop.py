"""The loop under ``job.steps``: formations, plans and steps, one transaction after the other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending

from heterotrain import data
from heterotrain.assembly import Standing
from heterotrain.control import Verdict, to_row, verdict
from heterotrain.errors import PeerLost, RepeatStep, UsageError
from heterotrain.farewell import Farewell
from heterotrain.identity import Identity
from heterotrain.keeper import CheckpointKeeper
from heterotrain.membership import Formed, Membership, agreed_plan, plan_slot
from heterotrain.observe import Observer
from heterotrain.plan_source import Held
from heterotrain.progress import advance, micro_batches, next_batch_samples, permutation, slice_of, step_seed
from heterotrain.reducer import Reducer
from heterotrain.report import Report
from heterotrain.roster import may_adopt, micro_batch_samples, roster_of, step_shares, workers_of
from heterotrain.sample_log import SampleLog
from heterotrain.step import Step, Task
from heterotrain.training import Training

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where samples come from: the same data set, in the same order, on every rank."""

    dataset: data.MapDataset
    samples: int
    collate: data.Collate | None
    shuffle: bool


class NobodyNeedsUs(Exception):  # noqa: N818 - names the event; it never leaves this file
    """Everything is committed and nobody is left who would need this rank's state."""


class Loop:
    """Drives one rank from its first formation to its farewell."""

    def __init__(
        self,
        *,
        identity: Identity,
        config: TrainingConfig,
        device: torch.device,
        training: Training,
        membership: Membership,
        keeper: CheckpointKeeper,
        observer: Observer,
        report: Report,
        farewell: Farewell,
    ) -> None:
        self.formed: Formed | None = None
        self.stop_reason = ""
        self.leave_requested = False
        self.reducer: Reducer | None = None
        self.run_hooks: Callable[[int], None] = lambda _epoch: None
        self.schedulers: list[Any] = []
        self._identity = identity
        self._config = config
        self._device = device
        self._training = training
        self._membership = membership
        self._keeper = keeper
        self._observer = observer
        self._report = report
        self._farewell = farewell
        self._source: Source | None = None
        self._standing: Standing | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._micro_cap: int | None = None
        self._uncommitted: Step | None = None
        folder = identity.sample_log_dir
        self._log = SampleLog(folder, name=identity.name.replace("/", "-")) if folder else None

    def steps(self, source: Source) -> Iterator[Step]:
        """Yield steps until everything is committed."""
        self._source = source
        while True:
            try:
                formed = self.formed or self._form()
                self._finish_epoch()
                if self._is_done():
                    self._conclude(formed)
                    return
                self._keeper.maybe_write(formed, self._training)
                step = self._prepare(formed, source)
            except PeerLost as lost:
                self._break(lost)
                continue
            except NobodyNeedsUs:
                self._finish()
                return
            yield step
            if not step.committed:
                self._repeat(step)
            elif self.stop_reason:
                self._training.progress = replace(self._training.progress, stopped=True)

    # -- formations --------------------------------------------------------------------------------------------------

    def _form(self) -> Formed:
        formed = self._membership.form(self._standing)
        if formed is None:
            if self._is_done():
                raise NobodyNeedsUs
            self._leave()
        self.formed = formed
        roster = formed.roster
        self._log_late_commit(formed)
        self._observer.forget()
        self._report.gauges({
            names.PLAN_GENERATION: float(roster.formation.generation),
            names.PLAN_REVISION: float(roster.plan.revision),
            names.FORMATION: float(roster.formation.number),
            names.WORLD_SIZE: float(len(roster.plan_ranks)),
        })  # fmt: skip
        return formed

    def _break(self, lost: Exception) -> None:
        """Leave a formation that lost a member; the next turn of the loop looks for another one."""
        formed, self.formed = self.formed, None
        if formed is None:
            raise lost
        _log.warning("formation %s is over: %s", formed.roster.formation, lost)
        self._observer.membership_changed(names.CAUSE_LOSS)
        if formed.group is not None:
            formed.group.cut(str(lost))
            if self.reducer is not None:
                self.reducer.abandon()
            formed.group.close()
        self._standing = formed.standing

    def _disband(self, formed: Formed, *, leaving: frozenset[int], cause: str) -> None:
        """Close a formation that everybody leaves on purpose."""
        self._observer.membership_changed(cause)
        if formed.group is not None:
            try:
                formed.group.gather_now([0.0])  # nobody hangs up while another still waits for the end of the step
            except PeerLost as lost:
                formed.group.cut(str(lost))
            formed.group.close()
        self.formed = None
        self._standing = replace(formed.standing, leaving=leaving)

    def _leave(self) -> NoReturn:
        """End this rank as announced."""
        standing = self._standing
        if standing is not None and not standing.leaving:
            # It had to go while it waited for others: nobody took the state over from it.
            self._keeper.write_now(self._training, generation=standing.formation.generation)
        self._keeper.wait()
        self._farewell.say(Ending.LEFT, "told to go; the others know")
        self._membership.close()
        raise SystemExit(0)

    def _conclude(self, formed: Formed) -> None:
        """End the training together: nobody goes before everybody has committed everything and it is kept.

        Raises:
            PeerLost: somebody went away meanwhile; whoever is left may still need this rank's state.
        """
        self._membership.everything_committed()
        self._keeper.write_final(formed, self._training)
        if formed.group is not None:
            formed.group.gather_now([0.0])
        self._finish()
        if formed.group is not None:
            formed.group.close()

    def _finish(self) -> None:
        """Say the last word of a rank that has committed everything."""
        if self.formed is None and self._standing is not None:
            self._keeper.write_now(self._training, generation=self._standing.formation.generation)
        self._keeper.wait()
        self._farewell.say(Ending.FINISHED, self.stop_reason or "every epoch is committed")
        self._membership.close()

    def _is_done(self) -> bool:
        progress = self._training.progress
        return progress.stopped or (progress.epoch >= self._config.epochs and progress.evaluated >= progress.epoch)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prepare(self, formed: Formed, source: Source) -> Step:
        progress = self._training.progress
        self._adopt(formed)
        roster = formed.roster
        batch = next_batch_samples(
            progress, global_batch_samples=roster.plan.global_batch_samples, epoch_samples=source.samples
        )
        shares = step_shares(roster, epoch=progress.epoch, epoch_step=progress.epoch_steps, batch_samples=batch)
        start, stop = slice_of(shares, formed.rank)
        ids = tuple(self._order()[progress.cursor + start : progress.cursor + stop].tolist())
        size = micro_batch_samples(formed.member, learned_cap_samples=self._micro_cap)
        task = Task(
            epoch=progress.epoch, number=progress.steps, batch_samples=batch, shares=shares, rank=formed.rank, cursor=progress.cursor,
            ids=ids, micro_batches=micro_batches(len(ids), size),
        )  # fmt: skip
        torch.manual_seed(step_seed(seed=self._config.seed, epoch=progress.epoch, position=progress.cursor + start))
        self._keep_buffers()
        reducer = self._must_reduce()
        reducer.begin()
        wanted = self._observer.begin(reducer, progress.steps)
        return Step(
            task=task, reducer=reducer, group=formed.group, host=self,
            on_launch=self._observer.on_launch if wanted else None,
        )  # fmt: skip

    def _adopt(self, formed: Formed) -> None:
        """Put a newer revision into force when this is a boundary."""
        progress = self._training.progress
        if not may_adopt(formed.roster, formed.agreed.plan, epoch_step=progress.epoch_steps):
            return
        formed.roster = roster_of(
            formed.agreed.plan, plan_ranks=formed.roster.plan_ranks, formation=formed.roster.formation,
            epoch=progress.epoch, epoch_step=progress.epoch_steps,
        )  # fmt: skip
        plan = formed.roster.plan
        self._report.gauges({names.PLAN_REVISION: float(plan.revision)})
        _log.info("plan %d.%d in force: shares %s", plan.generation, plan.revision, list(formed.roster.shares))

    def _repeat(self, step: Step) -> None:
        """Undo an attempt; the next turn of the loop yields the step again."""
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        if isinstance(step.failure, PeerLost):
            self._uncommitted = step
            self._break(step.failure)
        elif isinstance(step.failure, torch.OutOfMemoryError):
            self._halve(step)
        elif not isinstance(step.failure, RepeatStep):
            raise UsageError("run each step inside `with step:` and end it with step.apply(optimizer)")
        self._report.count(names.REPEATED_STEPS)

    def _halve(self, step: Step) -> None:
        """After running out of memory: from now on half the largest micro-batch."""
        largest = max(step.task.micro_batches)
        if largest == 1:
            raise UsageError(
                "one sample alone does not fit into memory: use a smaller model or sample"
            ) from step.failure
        self._micro_cap = largest // 2
        self._observer.forget()
        self._report.count(names.OUT_OF_MEMORY)
        self._report.gauges({names.MICRO_BATCH_CAP: float(self._micro_cap)})
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        _log.warning("out of memory with micro-batches of %d samples: using %d from now on", largest, self._micro_cap)

    def _keep_buffers(self) -> None:
        """Copy the model's buffers (running statistics and the like), so that a repeated step starts from the same."""
        model = self._training.model
        self._buffers = [(b, b.detach().clone()) for b in model.buffers()] if model is not None else []

    def _finish_epoch(self) -> None:
        """Run what the script wants done after an epoch, once per epoch."""
        progress = self._training.progress
        if progress.evaluated < progress.epoch:
            self.run_hooks(progress.epoch - 1)
            self._training.progress = replace(progress, evaluated=progress.epoch)
            self._observer.evaluated()

    # -- a step's host -----------------------------------------------------------------------------------------------

    def fetch(self, ids: Sequence[int]) -> Any:
        """Return the batch of these samples on the device."""
        source = self._must_source()
        return data.to_device(data.fetch(source.dataset, ids, source.collate), self._device)

    def is_broken(self) -> bool:
        """Return whether the formation is known to be broken."""
        return self.formed is None or (self.formed.group is not None and self.formed.group.is_cut)

    def vote(self, step: Step, *, ok: bool) -> Verdict:
        """Exchange the control vector and wait for the buckets.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        formed, reducer, observer = self._must_form(), self._must_reduce(), self._observer
        held = self._newest_for(formed)
        drained = self._identity.worker in formed.agreed.plan.drain
        slot = replace(
            plan_slot(
                held, vote=ok, steps=step.task.number, leaving=self.leave_requested or drained, weight=step.weight
            ),
            loss_sum=float(step.loss_sum),
            small_squared=observer.small_squared,
            buckets_s=observer.buckets_s or (math.nan,) * len(reducer.flats),
        )
        row = to_row(slot)
        if formed.group is None:
            decision = verdict([row])
        else:
            work, slots = formed.group.gather(torch.tensor(row, dtype=torch.float64))
            reducer.wait()
            formed.group.wait(work)
            formed.group.finish_device()
            decision = verdict([other.tolist() for other in slots])
            held = agreed_plan(formed.group, decision, held, job_uid=self._identity.job_uid)
            self._membership.offer(held.text)
        if held.plan.version > formed.agreed.plan.version:
            formed.agreed = held
        return decision

    def commit(self, step: Step, decision: Verdict) -> None:
        """Everything that follows a step that all ranks finished."""
        now_s = time.perf_counter()
        formed = self._must_form()
        self._training.progress = advance(
            self._training.progress, batch_samples=step.task.batch_samples, epoch_samples=self._must_source().samples
        )
        self._write_log(step, formed.standing)
        for scheduler in self.schedulers:
            scheduler.step()
        self._observer.committed(step, decision, formed, now_s=now_s)
        self._follow(formed, decision)

    def _follow(self, formed: Formed, decision: Verdict) -> None:
        """Act on what the control vector said: who leaves, and whether a new generation begins."""
        roster = formed.roster
        pods = workers_of(roster.plan, tuple(roster.plan_ranks[rank] for rank in decision.leaving))
        leaving = frozenset(rank for rank in roster.plan_ranks if roster.plan.members[rank].worker in pods)
        newer = formed.agreed.plan.generation > roster.formation.generation
        if not leaving and not newer:
            return
        joins = newer and len(formed.agreed.plan.members) > len(roster.plan_ranks)
        self._disband(formed, leaving=leaving, cause=names.CAUSE_JOIN if joins else names.CAUSE_LEAVE)
        if not leaving:
            return
        self._keeper.want()  # whole spot pools vanish together: a survivor keeps the state
        if roster.plan_ranks[formed.rank] in leaving:
            self.leave_requested = True
            self._membership.leave_soon(self._config.grace_s / 3)
            lowest_leaver = min(leaving)
            if len(leaving) == len(roster.plan_ranks) and roster.plan_ranks[formed.rank] == lowest_leaver:
                self._keeper.write_now(
                    self._training, generation=roster.formation.generation
                )  # nobody stays: the job cannot go on without it

    # -- small things ------------------------------------------------------------------------------------------------

    def _newest_for(self, formed: Formed) -> Held:
        newest = self._membership.newest()
        return newest if newest is not None and newest.plan.version > formed.agreed.plan.version else formed.agreed

    def _order(self) -> Any:
        source = self._must_source()
        return permutation(
            seed=self._config.seed, epoch=self._training.progress.epoch, epoch_samples=source.samples,
            shuffle=source.shuffle,
        )  # fmt: skip

    def _write_log(self, step: Step, standing: Standing) -> None:
        if self._log is None:
            return
        task, source = step.task, self._must_source()
        order = permutation(
            seed=self._config.seed, epoch=task.epoch, epoch_samples=source.samples, shuffle=source.shuffle
        )
        self._log.write({
            "at_s": time.time(), "epoch": task.epoch, "step": task.number, "generation": standing.formation.generation,
            "formation": standing.formation.number, "rank": task.rank, "shares": task.shares, "ids": task.ids,
            "batch_ids": order[task.cursor : task.cursor + task.batch_samples].tolist(),
        })  # fmt: skip

    def _log_late_commit(self, formed: Formed) -> None:
        """Write the line of a step that others had committed when this rank lost them."""
        step, self._uncommitted = self._uncommitted, None
        if step is not None and formed.group is not None and self._training.progress.steps > step.task.number:
            self._write_log(step, self._standing or formed.standing)

    def _must_form(self) -> Formed:
        if self.formed is None:
            raise PeerLost("there is no formation")
        return self.formed

    def _must_reduce(self) -> Reducer:
        if self.reducer is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.reducer

    def _must_source(self) -> Source:
        if self._source is None:
            raise UsageError("call job.steps first")
        return self._source
