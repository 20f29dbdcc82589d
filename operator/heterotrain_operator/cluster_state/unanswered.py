"""Jobs with changes that no operator has answered: after a time without a leader, or without watch events."""

from __future__ import annotations

from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.views import JobKey, NodeReadiness


def unanswered(store: Store) -> list[JobKey]:
    """Return jobs whose spec has changed since their status was written, and those with workers on ending nodes.

    A new job is not among them: nothing trains yet. A node ends that is gone, not ready, or whose end is announced.
    """
    changed = [key for key, job in store.jobs.all().items() if 0 < job.status.observed_generation < job.generation]
    nodes = store.nodes.all()
    ending = {
        pod.key
        for pod in store.pods.all().values()
        if pod.node and not pod.phase_ended
        and ((node := nodes.get(pod.node)) is None or node.announced or node.readiness is not NodeReadiness.TRUE)
    }  # fmt: skip
    return list(dict.fromkeys([*changed, *sorted(ending & store.jobs.all().keys())]))
