"""Decides which changes of a node matter, and to which jobs without a worker on it."""

from __future__ import annotations

from collections.abc import Iterable

from heterotrain_operator.api.reading import most_workers
from heterotrain_operator.cluster_state.views import JobView, NodeView, ValidJob
from heterotrain_operator.decide.objects.pods import selector_keys, template_of


def wants_one_of(job: JobView, nodes: Iterable[NodeView], *, placed: int) -> bool:
    """Return whether the job misses workers, and a node has the labels that one of its pools selects.

    Taints and sizes are left to the job's own pass: they decide what a condition says about the nodes.

    Args:
        job: the job.
        nodes: nodes, before a change and after it.
        placed: workers of the job that have a node.
    """
    if not isinstance(job, ValidJob) or job.deleting or job.status.completion_time is not None or job.spec.suspend:
        return False
    if placed >= most_workers(job.spec):
        return False
    selectors = [
        {**((template_of(job, pool).get("spec") or {}).get("nodeSelector") or {}), **pool.node_selector}
        for pool in job.spec.worker_pools
    ]
    return any(selector.items() <= node.labels.items() for node in nodes for selector in selectors)


def changes_decisions(before: NodeView, after: NodeView, jobs: Iterable[JobView]) -> bool:
    """Return whether a node changed in a way that decisions depend on: its labels do where a job selects by them.

    Heartbeats change nothing, and programs that discover features rewrite labels that no job asks for.
    """
    if _without_labels(before) != _without_labels(after):
        return True
    changed = {name for name, _ in before.labels.items() ^ after.labels.items()}
    return bool(changed) and any(not changed.isdisjoint(selector_keys(job)) for job in jobs)


def _without_labels(node: NodeView) -> tuple[object, ...]:
    """Return what decisions depend on, besides labels."""
    return (node.taints, node.announced, node.readiness, node.cordoned, node.allocatable)
