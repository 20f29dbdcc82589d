"""Nodes that the pods of a job must not be placed on, by pool."""

from __future__ import annotations

from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.inputs import DerivedState, JobInputs
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.workers.capacity import admits, shape_of

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
