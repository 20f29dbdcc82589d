"""Everything that one pass has found out about a job, before it is put into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import MemberId, Telemetry
from heterotrain_operator.cluster_state.views import JobView
from heterotrain_operator.decide.grants.grant import JobGrant
from heterotrain_operator.decide.lifecycle import Acceptance, Life, Stage
from heterotrain_operator.decide.plan.shares import Shares
from heterotrain_operator.decide.workers.failures import Accounts
from heterotrain_operator.decide.workers.state import Worker, WorkerState

# The kubelet's reasons for a container that will not start however long one waits.
HOPELESS = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
        "CreateContainerError", "RunContainerError", "CrashLoopBackOff", "Init:CrashLoopBackOff",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What is, and what this pass does about it.

    Attributes:
        desired: by pool, workers that should exist now.
        shortage: why not more workers fit; empty when every pool is full.
        plan: the plan after this pass, ``None`` when there is none.
        shares: what this pass found out about shares; ``None`` when nothing new was there to decide on.
        refusal: the API server's answer when it refused to create a pod, in earnest or on trial; empty when it did not.
        blocked: its answer when it refused anything else; empty when it did not.
        grant: what the job may have of nodes that others want, too.
    """

    job: JobView
    spec: HeteroTrainJobSpec | None
    workers: Sequence[Worker]
    accounts: Accounts
    acceptance: Acceptance
    life: Life
    plan: Plan | None
    shares: Shares | None
    desired: dict[str, int]
    shortage: str
    refusal: str
    blocked: str
    grant: JobGrant
    telemetry: Telemetry
    now_s: float

    @property
    def alive(self) -> list[Worker]:
        """Workers that can be counted on."""
        return [worker for worker in self.workers if worker.alive]

    @property
    def placed(self) -> list[Worker]:
        """Workers that can be counted on and have a node."""
        return [worker for worker in self.workers if worker.placed]

    @property
    def ready(self) -> int:
        """Workers that are ready to train."""
        return sum(worker.state is WorkerState.READY for worker in self.workers)

    @property
    def training(self) -> list[Worker]:
        """Workers that the plan names and that still run."""
        named = {member.worker_uid for member in self.plan.members} if self.plan else set()
        return [w for w in self.workers if w.pod.uid in named and (w.placed or w.state is WorkerState.LEAVING)]

    @property
    def runs(self) -> bool:
        """Whether training goes on: enough members of the plan are there."""
        if self.spec is None or self.life.stage not in (Stage.ACTIVE, Stage.FINISHING):
            return False
        return self.life.stage is Stage.FINISHING or len(self.training) >= self.spec.elastic_policy.min_replicas

    @property
    def began(self) -> bool:
        """Whether training had begun since the job was started or resumed."""
        return self.job.status.training_since is not None

    @property
    def draining(self) -> list[Worker]:
        """Members that are about to go."""
        return [worker for worker in self.training if worker.state is WorkerState.LEAVING]

    @property
    def blocked_worker(self) -> Worker | None:
        """A worker that has a node but can't start, whatever one waits for."""
        return next(
            (w for w in self.workers if w.state is WorkerState.STARTING and w.pod.waiting_reason in HOPELESS), None
        )

    @property
    def applied(self) -> tuple[int, int] | None:
        """The version that every member of the plan has in force by its own word; ``None`` while that is not known."""
        if self.plan is None or not self.plan.members:
            return None
        versions = []
        for member in self.plan.members:
            gauges = self.telemetry.gauges.get(MemberId(member.worker_uid, member.local_rank))
            if gauges is None or gauges.generation is None or gauges.revision is None:
                return None
            versions.append((gauges.generation, gauges.revision))
        return min(versions)
