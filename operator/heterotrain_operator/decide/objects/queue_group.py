"""A job's pods as one pod group of Kueue, where the template asks for it: admitted together or not at all.

The template names the group by the label ``kueue.x-k8s.io/pod-group-name``. Kueue's groups end: a member that has
succeeded is not replaced, and gives its part of the quota back for good. But a worker that was asked to leave succeeds,
too. So the members form a group that serves, as those of Kueue's integration of StatefulSets do:

- A pod takes its place until it has failed, or is gone. So a replacement is created only once there is a place: Kueue
  would delete one too many.
- Kueue keeps a deleted pod of a group, by a finalizer, until it is replaced. The operator has counted its end by then,
  and removes the finalizer. A suspended job would keep its part of the quota, and a deleted one its pods.
- A group that serves lasts as long as its pods. Those that an ended job keeps for their logs end it by annotations.
- Pods with equal specs have one role, and no member may get a role that the group began without. The operator names the
  pools as roles: replacements that avoid a node have another affinity.

Source: Kueue's documentation, "Run A Group Of Pods", and its pod and StatefulSet controllers in v0.14.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.text import listed
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import QUEUE_GROUP, QUEUE_SERVING
from heterotrain_operator.cluster_state.views import JobView, PodView
from heterotrain_operator.decide.objects.pod_group import least_members
from heterotrain_operator.decide.workers.state import Worker

COUNT = "kueue.x-k8s.io/pod-group-total-count"
ROLE = "kueue.x-k8s.io/role-hash"
MOST_ROLES = 8
_MOST_PREFIX, _UID_CHARACTERS = 50, 8
"""Characters of the template's name for the group and of the job's uid; a label has at most 63."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a group has room for.

    Attributes:
        free: how many pods may be created now.
        reason: what others wait for, in one sentence; empty when nothing is in the way.
    """

    free: int
    reason: str = ""


def group_name(template: Mapping[str, Any]) -> str:
    """Return the name that a template gives its group; empty without a group."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return str(labels.get(QUEUE_GROUP) or "")


def size_of(spec: HeteroTrainJobSpec) -> int:
    """Return the number of members: all workers that the pools may have."""
    return sum(pool.max_replicas for pool in spec.worker_pools)


def group_problem(template: Mapping[str, Any], spec: HeteroTrainJobSpec) -> str:
    """Return why a job's pods cannot be a group, in one sentence; empty when they can or are none."""
    if not group_name(template):
        return ""
    size = size_of(spec)
    if least_members(spec) != size:
        return (
            f"the label {QUEUE_GROUP} makes all workers one group, which Kueue admits as a whole: set "
            f"elasticPolicy.minReplicas to {size}, the sum of the pools' maxReplicas, or remove the label"
        )
    if len(spec.worker_pools) > MOST_ROLES:
        return f"a pod group of Kueue has at most {MOST_ROLES} roles: use at most {MOST_ROLES} worker pools"
    given = ((template.get("metadata") or {}).get("annotations") or {}).get(COUNT)
    if given is not None and given != str(size):
        return f"the annotation {COUNT} is {given}, but the job has {size} workers: leave it out, the operator sets it"
    return ""


def group_metadata(
    job: JobView, template: Mapping[str, Any], spec: HeteroTrainJobSpec, pool: WorkerPool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of a member; none without a group.

    Args:
        job: the job; its uid is part of the group's name, so that a job of the same name begins another group.
        template: of the pool's pods.
        spec: of the job.
        pool: the member's pool.
    """
    if not (name := group_name(template)):
        return {}, {}
    group = f"{name[:_MOST_PREFIX].rstrip('-.')}-{job.uid[:_UID_CHARACTERS]}"
    # Kueue makes the role the name of a set of pods, which has to be short.
    role = hashlib.sha256(pool.name.encode()).hexdigest()[:8]
    return {QUEUE_GROUP: group}, {COUNT: str(size_of(spec)), ROLE: role, QUEUE_SERVING: "true"}


def places_of(job: JobView, spec: HeteroTrainJobSpec, workers: Sequence[Worker]) -> Places | None:
    """Return what the group of the job's workers has room for; ``None`` for a job without a group."""
    if not group_name(job.template):
        return None
    taken = [worker for worker in workers if worker.pod.queue_group and _takes_place(worker)]
    leaving = sorted(worker.pod.name for worker in taken if not worker.alive)
    reason = f"Kueue's group has no place before they are gone: {listed(leaving, most=_MOST_NAMED)}" if leaving else ""
    return Places(free=max(0, size_of(spec) - len(taken)), reason=reason)


def held_by_queue(pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Return the pods of groups that only Kueue's finalizer keeps: they are deleted, and nothing of them runs."""
    return tuple(
        pod for pod in pods if pod.queue_group and pod.queue_held and pod.deleting and (pod.phase_ended or not pod.node)
    )


def of_ended_groups(pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Return the pods of an ended job that stay, and have to tell Kueue that their group ends."""
    return tuple(pod for pod in pods if pod.queue_group and pod.queue_held and not pod.queue_final and not pod.deleting)


def _takes_place(worker: Worker) -> bool:
    """Return whether Kueue counts a pod as one of the members (its ``isPodRunnableOrSucceeded``)."""
    pod = worker.pod
    return pod.phase != "Failed" and not (pod.deleting and not pod.node)
