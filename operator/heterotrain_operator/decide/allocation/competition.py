"""Groups jobs that compete for the same nodes.

Jobs that share no node, not even through other jobs, are decided separately. A large cluster thus becomes many small
problems, and a job that cannot be decided affects only its own competition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from heterotrain_operator.api.conditions import ConditionType, condition_holds, find_condition
from heterotrain_operator.api.reading import managed_by_us
from heterotrain_operator.cluster_state.quantity import added
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, JobView, NodeView, PlanObject, PodView, ValidJob
from heterotrain_operator.decide.allocation.demand import Competitor
from heterotrain_operator.decide.allocation.node_group import NodeGroup, PoolKey, node_groups
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.decide.learn.throughput import ThroughputModel
from heterotrain_operator.decide.plan.plan import read_plan
from heterotrain_operator.decide.workers.capacity import AdmittedPod, Shape, admits
from heterotrain_operator.decide.workers.state import WorkerState, worker_states


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationInput:
    """One job for the allocation: its pods, plan, telemetry and throughput, and by pool the shape of a worker.

    ``admitted`` has by pool what admission makes of a worker's pod, as far as that is known.
    """

    job: ValidJob
    pods: Sequence[PodView]
    plan: PlanObject | None
    telemetry: Telemetry
    throughput: ThroughputModel
    shapes: Mapping[str, Shape]
    admitted: Mapping[str, AdmittedPod] = field(default_factory=dict)

    @property
    def priority(self) -> int:
        """The largest priority of its pods: those that it would create, else those that it has."""
        known = [each.priority for each in self.admitted.values()] or [pod.priority for pod in self.pods]
        return max(known, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Competition:
    """Jobs that compete for nodes, directly or through other jobs, and the node groups that they compete for."""

    competitors: tuple[Competitor, ...]
    node_groups: tuple[NodeGroup, ...]


def takes_part(job: JobView) -> TypeGuard[ValidJob]:
    """Return whether a job may want workers: managed by this operator, valid, accepted, not suspended and not ended."""
    if not isinstance(job, ValidJob) or not managed_by_us(job.spec) or job.spec.suspend or job.deleting:
        return False
    conditions = job.status.conditions
    ended = any(condition_holds(conditions, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED))
    accepted = find_condition(conditions, ConditionType.ACCEPTED)
    return not ended and (accepted is None or accepted.status != "False")


def competitions(
    inputs: Iterable[AllocationInput],
    nodes: Mapping[str, NodeView],
    used: Mapping[str, Mapping[str, float]],
    before: Callable[[JobKey], JobGrant],
    left_out: Callable[[JobKey, Exception], None] = lambda _key, _error: None,
) -> tuple[Competition, ...]:
    """Return the separate competitions of the cluster.

    Args:
        inputs: all jobs that take part.
        nodes: all nodes of the cluster.
        used: by node, the requests of all running pods, those of ``inputs`` included.
        before: returns a job's grant from the previous allocation.
        left_out: called with a job that can't be read because of an unexpected error; it keeps its grant, its workers
            keep their nodes, and the other jobs compete as before.
    """
    competitors: list[Competitor] = []
    shapes: dict[PoolKey, Shape] = {}
    for each in inputs:
        try:
            competitor = _competitor(each, nodes, before)
        except Exception as error:  # noqa: BLE001  # reported by the caller
            left_out(each.job.key, error)
            continue
        if competitor is None:
            continue
        competitors.append(competitor)
        shapes |= {PoolKey(each.job.key, pool): shape for pool, shape in each.shapes.items()}
    found = node_groups(shapes, nodes, _taken(competitors, shapes, nodes, used))
    first = _first_job_of_each_part([competitor.job.key for competitor in competitors], found)
    parts: dict[JobKey, tuple[list[Competitor], list[NodeGroup]]] = {
        key: ([], []) for key in sorted(set(first.values()))
    }
    for competitor in competitors:
        parts[first[competitor.job.key]][0].append(competitor)
    for group in found:
        parts[first[next(iter(group.sizes)).job]][1].append(group)
    return tuple(Competition(competitors=tuple(jobs), node_groups=tuple(groups)) for jobs, groups in parts.values())


def _competitor(
    each: AllocationInput, nodes: Mapping[str, NodeView], before: Callable[[JobKey], JobGrant]
) -> Competitor | None:
    """Return a job as a competitor; ``None`` when it is finishing."""
    workers = worker_states(each.pods, nodes)
    if any(worker.state is WorkerState.FINISHED for worker in workers):
        return None
    return Competitor(
        job=each.job,
        workers=workers,
        plan=read_plan(each.job, each.plan).plan,
        telemetry=each.telemetry,
        throughput=each.throughput,
        before=before(each.job.key),
        priority=each.priority,
    )


def _taken(
    competitors: Iterable[Competitor],
    shapes: Mapping[PoolKey, Shape],
    nodes: Mapping[str, NodeView],
    used: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float]]:
    """Return the requests of other pods by node: what competitors' workers use may go to another competitor."""
    own: dict[str, list[Mapping[str, float]]] = {}
    for competitor in competitors:
        for worker in competitor.workers:
            shape, node = shapes.get(PoolKey(competitor.job.key, worker.pod.pool)), nodes.get(worker.pod.node)
            if shape is not None and node is not None and not worker.pod.phase_ended and admits(shape, node):
                own.setdefault(node.name, []).append(worker.pod.requests)
    return {
        node: added([used.get(node, {}), *({name: -x for name, x in each.items()} for each in own.get(node, ()))])
        for node in nodes
    }


def _first_job_of_each_part(jobs: Sequence[JobKey], found: Iterable[NodeGroup]) -> dict[JobKey, JobKey]:
    """Return for each job the first job of its part; jobs that share a node group are in the same part."""
    head = {job: job for job in jobs}

    def first(job: JobKey) -> JobKey:
        while head[job] != job:
            head[job] = head[head[job]]
            job = head[job]
        return job

    for group in found:
        heads = {first(pool_key.job) for pool_key in group.sizes}
        head.update(dict.fromkeys(heads, min(heads)))
    return {job: first(job) for job in jobs}
