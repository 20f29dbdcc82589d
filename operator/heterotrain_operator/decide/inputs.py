"""The input of a pass over one job, and what follows from it before anything is decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from heterotrain_operator.api.conditions import ConditionType, condition_holds
from heterotrain_operator.api.failures import FailurePolicy
from heterotrain_operator.api.types import count
from heterotrain_operator.cluster_state.saved import SavedCheckpoint
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, NodeView, PlanObject, PodView
from heterotrain_operator.decide.grant import UNLIMITED, JobGrant
from heterotrain_operator.decide.learn.job_model import JobModel
from heterotrain_operator.decide.lifecycle import Acceptance, Life, decide_life
from heterotrain_operator.decide.plan.memory_limits import MemoryLimits, memory_limits
from heterotrain_operator.decide.plan.plan import PlanInForce, read_plan
from heterotrain_operator.decide.plan.stages import CoverOf
from heterotrain_operator.decide.workers.capacity import AdmittedPod, FreeSlots, Shape
from heterotrain_operator.decide.workers.failure_rules import judged
from heterotrain_operator.decide.workers.failures import Accounts, account
from heterotrain_operator.decide.workers.state import Worker, WorkerState, worker_states


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Everything that a pass over one job looks at.

    Attributes:
        pods: all pods with the job's labels.
        nodes: by name, all nodes of the cluster.
        used: by node, the sum of the requests of running pods, other users' pods included.
        acceptance: the API server's answer to a dry run of the job's pods.
        refusal: the API server's answer when it refused to create a pod in the previous pass; otherwise empty.
        blocked: its answer when it refused any other write; otherwise empty.
        model: what is learned from the job's telemetry.
        gather_s: longest time for which a ready worker waits for starting ones.
        grant: what the job may use of nodes that other jobs want, too.
        keep_plan: whether no plan is to be written, because the previous one was just refused.
        keep_pods: whether no pod is to be created, because one was just refused.
        taken_indices: worker indices whose names foreign pods have.
        saved: the newest checkpoint in the outcomes of pods that are gone; ``None`` for none.
        admitted: by pool, what admission makes of its pods, as far as that is known.
        slots_of: how many more workers of a shape fit.
        cover_of: what the layout planner has answered about members of several workers.
    """

    job: JobView
    pods: Sequence[PodView]
    nodes: Mapping[str, NodeView]
    used: Callable[[], Mapping[str, Mapping[str, float]]]
    plan: PlanObject | None
    telemetry: Telemetry
    acceptance: Acceptance
    refusal: str
    blocked: str
    gather_s: float
    slots_of: Callable[[Shape], FreeSlots]
    now_s: float
    model: JobModel = field(default_factory=JobModel)
    grant: JobGrant = UNLIMITED
    keep_plan: bool = False
    keep_pods: bool = False
    taken_indices: frozenset[int] = frozenset()
    saved: SavedCheckpoint | None = None
    admitted: Mapping[str, AdmittedPod] = field(default_factory=dict)
    cover_of: CoverOf = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedState:
    """What follows from the inputs.

    Attributes:
        workers: the job's own workers with their states.
        in_force: the plan that the cluster holds.
        accounts: counted failures and disruptions.
        life: the stage of the job's life.
        memory: what devices are planned with, where memory ran out.
    """

    workers: tuple[Worker, ...]
    in_force: PlanInForce
    accounts: Accounts
    life: Life
    memory: MemoryLimits = field(default_factory=MemoryLimits)


def derive(inputs: JobInputs) -> DerivedState:
    """Return what follows from the inputs."""
    job, now_s = inputs.job, inputs.now_s
    # Pods that only carry the labels (copied, or orphaned by a job of the same name) are not the job's workers.
    in_force = read_plan(job, inputs.plan)
    trained = job.status.training_since is not None or (in_force.plan is not None and bool(in_force.plan.members))
    workers = worker_states([p for p in inputs.pods if p.owner_uid == job.uid], inputs.nodes, trained=trained)
    policy = job.spec.failure_policy if job.spec is not None else FailurePolicy()
    workers = judged(workers, policy)
    counting = _counts_ends(job, workers)
    memory = memory_limits(job.spec, job.status, workers, in_force.plan, inputs.telemetry.profiles)
    accounts = account(
        job.status,
        workers,
        in_force.plan,
        answered=memory.answers,
        departed=inputs.plan.departed if inputs.plan is not None else (),
        counting=counting,
        step=_committed_steps(inputs),
        now_s=now_s,
    )
    life = decide_life(job, workers, accounts, inputs.acceptance, now_s=now_s)
    return DerivedState(workers=workers, in_force=in_force, accounts=accounts, life=life, memory=memory)


def _committed_steps(inputs: JobInputs) -> int | None:
    """Return the number of committed steps, by the workers' last words and by Prometheus; ``None`` without either."""
    newest = inputs.telemetry.newest
    found = [newest.step if newest is not None else None, inputs.saved.step if inputs.saved is not None else None]
    return max((count(step) for step in (*found, inputs.job.status.step) if step is not None), default=None)


def _counts_ends(job: JobView, workers: Sequence[Worker]) -> bool:
    """Return whether the end of a worker counts as failure or disruption, because the job itself does not end it."""
    conditions = job.status.conditions
    ended = any(condition_holds(conditions, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED))
    suspended = job.spec is None or job.spec.suspend
    return not (ended or suspended or any(worker.state is WorkerState.FINISHED for worker in workers))
