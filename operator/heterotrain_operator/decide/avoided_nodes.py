"""Nodes that the pods of a job must not be placed on, by pool, and workers that got such a node all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from heterotrain_core.contract.plan import Plan

from heterotrain_operator.cluster_state.views import NodeView, ValidJob
from heterotrain_operator.decide.inputs import DerivedState, JobInputs
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.workers.capacity import admits, shape_of
from heterotrain_operator.decide.workers.state import Worker, WorkerState

_CONDITIONS = "node.kubernetes.io/"
"""Kubernetes' own taints begin so: they follow the conditions of a node."""
MOST_AVOIDED = 16
"""Nodes that a pod excludes by name."""


def nodes_to_blame(inputs: JobInputs, derived: DerivedState, job: ValidJob) -> dict[str, tuple[str, ...]]:
    """Return by pool the nodes that the job avoids because its workers failed there.

    Where none of a pool's nodes were left, the job would wait for nothing: then they are used all the same.
    """
    names = [node.name for node in derived.accounts.blamed if node.avoided]
    present = [inputs.nodes[name] for name in names if name in inputs.nodes]
    if not present:
        return {}
    found = {}
    for pool in job.spec.worker_pools:
        shape = shape_of(build_pod(job, pool, 0, plan_version=""), {})
        those = tuple(node.name for node in present if admits(shape, node))[:MOST_AVOIDED]
        if any(admits(shape, node) for node in inputs.nodes.values() if node.name not in those):
            found[pool.name] = those
    return found


def workers_to_remove(
    inputs: JobInputs, workers: Sequence[Worker], *plans: Plan | None
) -> tuple[tuple[Worker, str], ...]:
    """Return the workers on nodes that are held down that no plan names, each with the reason.

    Workers that a plan names leave by themselves when a later one does not. These got the node before it was held, or
    before their pod excluded it, and nothing else would end them.
    """
    named = {rank.worker_uid for plan in plans if plan is not None for rank in plan.ranks}
    return tuple(
        (worker, worker.reason)
        for worker in workers
        if worker.state is WorkerState.LEAVING
        and worker.pod.node in inputs.held
        and worker.pod.uid not in named
        and not worker.pod.deleting
    )


def nodes_to_avoid(
    inputs: JobInputs, job: ValidJob, blamed: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return by pool the nodes that its workers must not be placed on, at most ``MOST_AVOIDED``.

    These are nodes that are held down and would otherwise take them, and those that the job avoids.
    """
    if not inputs.held:
        return dict(blamed)
    found = {}
    for pool in job.spec.worker_pools:
        shape = shape_of(build_pod(job, pool, 0, plan_version=""), {})
        held = (name for name, node in inputs.held.items() if admits(shape, _when_well(node)))
        names = sorted({*held, *blamed.get(pool.name, ())})
        found[pool.name] = tuple(names[:MOST_AVOIDED])
    return found


def _when_well(node: NodeView) -> NodeView:
    """Return a node without what Kubernetes adds while it is not ready: a pod of now may get it once it is."""
    taints = tuple(taint for taint in node.taints if not taint.key.startswith(_CONDITIONS))
    return replace(node, taints=taints, cordoned=False)
