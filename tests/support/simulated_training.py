"""A job in a fake cluster that trains like the real trainer: it adopts plans at boundaries, is scraped and decided on.

The operator's telemetry and decisions are real, and so are the trainer's rules about which rank takes which samples and
when. Only the seconds of a step come from given time models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterotrain.data.progress import Progress, advance, slice_of
from heterotrain.membership.roster import FormationId, Roster, may_adopt, roster_of, step_shares
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import ComputeTime, Plan
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.snapshot import JobSeries, counter_name

from support.exported_counters import SimulatedMembers
from support.fake_cluster import JOB_UID, FakeCluster


class Named(SimulatedMembers):
    """A cluster whose members carry the names that the operator's counters have."""

    names: Sequence[str] = ()

    def name(self, rank: int) -> str:
        return self.names[rank]


class Training:
    """A running job of one generation.

    Attributes:
        speeds: the members' true speeds.
        revisions: revisions written so far, in order, with the committed steps at which they were.
        taken: sample positions of each epoch in the order in which they were committed.
        noise_samples: the noise scale that the trainer measures; may be changed.
        adopted_at: committed steps of the epoch when a plan took effect last.
    """

    def __init__(
        self,
        cluster: FakeCluster,
        truth: Sequence[ComputeTime],
        *,
        epoch_samples: int,
        scrape_every: int,
        **speeds: object,
    ) -> None:
        self.cluster = cluster
        self.job = TelemetryHistory()
        self.speeds = Named(truth=truth, **speeds)  # type: ignore[arg-type]  # tests pass what they mean
        self.epoch_samples, self.scrape_every = epoch_samples, scrape_every
        self.progress = Progress()
        self._read: tuple[str, Any] = ("", None)
        self.noise_samples: float | None = None
        self.adopted_at = 0
        self.taken: dict[int, list[int]] = {}
        self.revisions: list[tuple[int, int]] = []
        plan = self.plan
        self.members = [MemberId(rank.worker_uid, rank.local_rank) for rank in plan.ranks]
        self.speeds.names = [counter_name(member) for member in self.members]
        self.roster: Roster = roster_of(
            plan,
            plan_ranks=tuple(range(len(plan.ranks))),
            formation=FormationId(generation=plan.generation, number=0),
        )

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        assert self.cluster.plan is not None, "the job does not train yet"
        text = self.cluster.plan["data"]["plan.json"]
        if text != self._read[0]:
            plan = decode_plan(text, job_uid=JOB_UID)
            assert not isinstance(plan, Refused)
            self._read = (text, plan)
        found: Plan = self._read[1]
        return found

    def epoch(self) -> None:
        """Train to the end of the epoch."""
        end = self.progress.epoch + 1
        while self.progress.epoch < end:
            self.step()

    def step(self) -> None:
        """Commit one step; scrape and decide when a scrape is due."""
        progress, newest = self.progress, self.plan
        if may_adopt(self.roster, newest, epoch_step=progress.epoch_steps):
            self.adopted_at = progress.epoch_steps
            self.roster = roster_of(
                newest,
                plan_ranks=self.roster.plan_ranks,
                formation=self.roster.formation,
                epoch=progress.epoch,
                epoch_step=progress.epoch_steps,
            )
        batch = min(self.roster.plan.global_batch_samples, self.epoch_samples - progress.cursor)
        shares = step_shares(self.roster, epoch=progress.epoch, epoch_step=progress.epoch_steps, batch_samples=batch)
        for rank in range(len(shares)):
            start, stop = slice_of(shares, rank)
            self.taken.setdefault(progress.epoch, []).extend(range(progress.cursor + start, progress.cursor + stop))
        self.speeds.run(shares)
        ends_epoch = progress.cursor + batch == self.epoch_samples
        self.progress = advance(progress, batch_samples=batch, ends_epoch=ends_epoch)
        if self.progress.steps % self.scrape_every == 0:
            self.scrape()

    @property
    def now_s(self) -> float:
        """The time of a scrape: the cluster's clock stands still while its job trains."""
        return self.cluster.now_s + sum(self.speeds.step_seconds)

    def gauges(self) -> MemberGauges:
        """Return what every member exports."""
        roster, progress = self.roster, self.progress
        return MemberGauges(
            worker="",
            generation=roster.formation.generation,
            revision=roster.plan.revision,
            epoch=progress.epoch,
            step=progress.steps,
            samples_committed=progress.samples,
            epoch_samples=self.epoch_samples,
            cursor_samples=progress.cursor,
            epoch_step=progress.epoch_steps,
            global_batch_samples=roster.plan.global_batch_samples,
            noise_scale_samples=self.noise_samples,
        )

    def scrape(self) -> None:
        """Scrape every member, and let the operator decide."""
        pools = {rank.worker_uid: self.plan.pool_of(rank) for rank in self.plan.ranks}
        self.job.take(
            JobSeries(counters=self.speeds.counters(), gauges=dict.fromkeys(self.members, self.gauges())),
            dict.fromkeys(self.members, self.now_s),
            pools=pools,
        )
        self.cluster.telemetry = self.job.telemetry
        before = self.plan.revision
        self.cluster.step()
        self.cluster.learns = False  # until there is new telemetry
        self.cluster.settle()
        self.cluster.learns = True
        if self.plan.revision > before:
            self.revisions.append((self.plan.revision, self.progress.steps))
