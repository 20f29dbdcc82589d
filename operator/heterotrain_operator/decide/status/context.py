"""Everything that one pass has found out and decided about a job: the source of its status and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.decide.faults import Faults
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.decide.inputs import DerivedState, JobInputs
from heterotrain_operator.decide.lifecycle import Life, LifeStage
from heterotrain_operator.decide.objects.common_parts import PodSources
from heterotrain_operator.decide.plan.arrangement import identity_of
from heterotrain_operator.decide.plan.plan import least_to_go_on
from heterotrain_operator.decide.plan.shares import Shares
from heterotrain_operator.decide.plan.stages import LayoutState
from heterotrain_operator.decide.renewal import NO_RENEWAL, Renewal
from heterotrain_operator.decide.workers.failures import Accounts
from heterotrain_operator.decide.workers.replicas import ReplicaDecision
from heterotrain_operator.decide.workers.state import Worker, WorkerState

# The kubelet's reasons for a container that will not start, however long one waits.
HOPELESS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
        "Init:CrashLoopBackOff",
    }
)


@dataclass(frozen=True, kw_only=True)  # without slots, so that what follows from the fields is computed once
class JobContext:
    """The inputs of a pass, and what it decided.

    Conditions, rows and events ask for the same values many times, and each takes a look at every worker or rank. So
    these are computed at the first question and kept, as the fields never change.

    Attributes:
        inputs: what the pass looked at.
        derived: what follows from the inputs; workers that this pass removes count as accounted.
        plan: the plan after this pass, ``None`` when there is none.
        shares: this pass's decision about shares, ``None`` when there was nothing new to decide on.
        replicas: workers that should exist.
        faults: collects unexpected errors of parts of the pass.
        layout: what is known about the members' layouts; ``None`` where these are not planned.
        sources: what new pods are made from; ``None`` for a job that gets none.
        renewal: workers that are renewed, or wait for it.
    """

    inputs: JobInputs
    derived: DerivedState
    plan: Plan | None
    shares: Shares | None
    replicas: ReplicaDecision
    faults: Faults
    layout: LayoutState | None = None
    sources: PodSources | None = None
    renewal: Renewal = NO_RENEWAL

    @property
    def job(self) -> JobView:
        """The job; its status is the one before this pass."""
        return self.inputs.job

    @property
    def spec(self) -> HeteroTrainJobSpec | None:
        """The job's spec, ``None`` when it is not valid."""
        return self.inputs.job.spec

    @property
    def workers(self) -> Sequence[Worker]:
        """The job's workers with their states."""
        return self.derived.workers

    @property
    def life(self) -> Life:
        """The stage of the job's life."""
        return self.derived.life

    @property
    def accounts(self) -> Accounts:
        """Counted failures and disruptions."""
        return self.derived.accounts

    @property
    def telemetry(self) -> Telemetry:
        """What Prometheus reported about the job."""
        return self.inputs.telemetry

    @property
    def grant(self) -> JobGrant:
        """What the job may use of nodes that other jobs want, too."""
        return self.inputs.grant

    @property
    def now_s(self) -> float:
        """Time of the pass, in seconds since the epoch."""
        return self.inputs.now_s

    @property
    def refusal(self) -> str:
        """The API server's answer when it refused a pod, in earnest or in a dry run; otherwise empty."""
        acceptance = self.inputs.acceptance
        return self.inputs.refusal or ("" if acceptance.ok else acceptance.message)

    @cached_property
    def desired(self) -> int:
        """Workers that should exist now, over all pools."""
        return sum(self.replicas.desired.values())

    @cached_property
    def alive(self) -> list[Worker]:
        """Workers that wait for a node, start or are ready."""
        return [worker for worker in self.workers if worker.alive]

    @cached_property
    def placed(self) -> list[Worker]:
        """Workers that start or are ready on a node."""
        return [worker for worker in self.workers if worker.placed]

    @cached_property
    def ready(self) -> int:
        """Number of workers that are ready to train."""
        return sum(worker.state is WorkerState.READY for worker in self.workers)

    @cached_property
    def training(self) -> list[Worker]:
        """Workers that are members of the plan and still run."""
        named = {rank.worker_uid for rank in self.plan.ranks} if self.plan else set()
        return [w for w in self.workers if w.pod.uid in named and (w.placed or w.state is WorkerState.LEAVING)]

    @cached_property
    def runs(self) -> bool:
        """Whether training goes on: enough members of the plan are running."""
        if self.spec is None or self.life.stage not in (LifeStage.ACTIVE, LifeStage.FINISHING):
            return False
        return self.life.stage is LifeStage.FINISHING or self.members_left >= least_to_go_on(self.spec)

    @cached_property
    def members_left(self) -> int:
        """How many replicas of the plan still run: members that have lost no rank, as ``minReplicas`` counts them."""
        if self.plan is None:
            return 0
        running = {worker.pod.uid for worker in self.training}
        return self.plan.replicas([rank.rank for rank in self.plan.ranks if rank.worker_uid in running])

    @cached_property
    def spares(self) -> list[Worker]:
        """Ready workers that are in no member, because the others are faster without them."""
        names = frozenset(self.plan.spares if self.plan is not None else ())
        return [worker for worker in self.workers if worker.state is WorkerState.READY and worker.pod.name in names]

    @property
    def began(self) -> bool:
        """Whether training has begun since the job was started or resumed."""
        return self.job.status.training_since is not None

    @cached_property
    def draining(self) -> list[Worker]:
        """Members that are about to leave."""
        return [worker for worker in self.training if worker.state is WorkerState.LEAVING]

    @cached_property
    def blocked_worker(self) -> Worker | None:
        """The first worker that has a node but cannot start until someone corrects the cause."""
        return next(
            (w for w in self.workers if w.state is WorkerState.STARTING and w.pod.waiting_reason in HOPELESS), None
        )

    @cached_property
    def solo_samples_per_s(self) -> dict[int, float]:
        """Samples per second of each member's own work, by index; that of its slowest rank, once all have one."""
        if self.plan is None:
            return {}
        measured = self.telemetry.rates.solo_samples_per_s
        rates = [[measured.get(identity_of(rank)) for rank in ranks] for ranks in self.plan.ranks_by_member]
        known = [[rate for rate in each if rate is not None] for each in rates]
        return {index: min(found) for index, found in enumerate(known) if found and len(found) == len(rates[index])}

    @cached_property
    def applied(self) -> tuple[int, int] | None:
        """The version that every rank of the plan reports to be in force; ``None`` while one has not reported."""
        if self.plan is None or not self.plan.members:
            return None
        versions = []
        for rank in self.plan.ranks:
            gauges = self.telemetry.gauges.get(identity_of(rank))
            if gauges is None or gauges.generation is None or gauges.revision is None:
                return None
            versions.append((gauges.generation, gauges.revision))
        return min(versions)
