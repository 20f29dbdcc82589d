"""What is learned about one job from its telemetry, as one value: passes, the allocation and the status read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heterotrain_core.contract.plan import Plan
from heterotrain_planner.planning.kept_speed import KeptSpeed, as_model

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.learn.persisted import persisted_throughput
from heterotrain_operator.decide.learn.throughput import ThroughputModel, throughput_of
from heterotrain_operator.decide.plan.shares import Shares, learn_shares
from heterotrain_operator.decide.plan.speeds import JobSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """The state of knowledge about a job's speed.

    Attributes:
        learned_for: generation of the spec, and sequence number of the telemetry.
        version: of the plan whose members ``shares`` are about.
        speeds: of all ranks that were observed; shares of other members follow from them.
        shares: the best ones of that plan's members; ``None`` before anything was learned.
        throughput: how fast the job is with any workers, from all of its plans so far.
        origin: where the speeds come from before anything was learned, in a clause; empty where there are none.
        fault: an unexpected error in the newest attempt to learn, in one sentence; otherwise empty.
    """

    learned_for: tuple[int, int] = (0, -1)
    version: tuple[int, int] = (0, 0)
    speeds: JobSpeeds = field(default_factory=JobSpeeds)
    shares: Shares | None = None
    throughput: ThroughputModel = field(default_factory=ThroughputModel)
    origin: str = ""
    fault: str = ""

    def shares_of(self, plan: Plan, *, generation: int) -> Shares | None:
        """Return the best shares of a plan's members; ``None`` if nothing was learned since this plan or spec."""
        return self.shares if (self.version, self.learned_for[0]) == (plan.version, generation) else None


def known_from(status: HeteroTrainJobStatus) -> JobModel:
    """Return what an earlier operator has learned and the status keeps."""
    return JobModel(throughput=persisted_throughput(status))


def starting_with(before: JobModel, speeds: Mapping[str, KeptSpeed], origin: str) -> JobModel:
    """Return what is known of a job that starts with these speeds by pool, unless it has learned its own."""
    if before.version > (0, 0):
        return before
    former = tuple((pool, as_model(speed, pool)) for pool, speed in speeds.items())
    return replace(before, speeds=JobSpeeds(former=former), origin=origin)


def learn(job: ValidJob, plan: Plan | None, telemetry: Telemetry, before: JobModel) -> JobModel:
    """Return what is known with this telemetry.

    Args:
        job: the job.
        plan: its newest plan, ``None`` without a readable one.
        telemetry: its newest telemetry.
        before: what was known before.
    """
    learned = replace(
        before,
        learned_for=(job.generation, telemetry.sequence),
        throughput=throughput_of(before.throughput, plan, telemetry),
        fault="",
    )
    if plan is None or not plan.members:
        return learned
    shares, speeds = learn_shares(job.spec, plan, telemetry, exchange=learned.throughput.exchange)
    return replace(
        learned, version=plan.version, origin="", shares=shares, speeds=before.speeds if speeds is None else speeds
    )
