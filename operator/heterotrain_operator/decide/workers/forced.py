"""Pods on lost nodes whose deletion is forced: only where an administrator has allowed that.

The API server keeps a pod that is being deleted until its kubelet confirms that its processes have ended. On a node
that is out of reach, nobody does. The pod then counts in quotas and holds its volumes until the node comes back.
Whether its processes still run is unknown, so a volume that only one node may write could be written by two.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_operator.cluster_state.views import PodView
from heterotrain_operator.decide.workers.state import Worker, WorkerState


def to_force(
    workers: Sequence[Worker], *, after_s: float | None, now_s: float
) -> tuple[tuple[PodView, ...], float | None]:
    """Return the pods to delete without their kubelets, and the seconds until the next ones (``None`` without any).

    Args:
        workers: of a job.
        after_s: seconds after the end of a pod's grace period; ``None`` where deletion is never forced.
        now_s: now.
    """
    if after_s is None:
        return (), None
    stuck = [worker.pod for worker in workers if worker.state is WorkerState.LOST and worker.pod.deleting]
    # Both times are the API server's. The first one is in the future until the grace period ends.
    waits_s = {pod.uid: max(0.0, pod.deletion_s + after_s - now_s) for pod in stuck}
    due = tuple(pod for pod in stuck if not waits_s[pod.uid])
    return due, min((wait_s for wait_s in waits_s.values() if wait_s), default=None)
