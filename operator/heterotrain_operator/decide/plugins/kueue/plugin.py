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
from collections.abc import Collection, Sequence

from heterotrain_operator.api.reading import least_workers
from heterotrain_operator.api.text import listed
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import PodView, ValidJob
from heterotrain_operator.decide.plugins.interface import NewPod, Object, Places, PodEdit, PodPatch

DOMAIN = "kueue.x-k8s.io/"
GROUP, COUNT, ROLE = f"{DOMAIN}pod-group-name", f"{DOMAIN}pod-group-total-count", f"{DOMAIN}role-hash"
FINALIZER, SERVING, RETRIABLE = f"{DOMAIN}managed", f"{DOMAIN}pod-group-serving", f"{DOMAIN}retriable-in-group"
MOST_ROLES = 8
_MOST_PREFIX, _UID_CHARACTERS = 50, 8
"""Characters of the template's name for the group and of the job's uid; a label has at most 63."""
_MOST_NAMED = 3


def _group_name(template: Object) -> str:
    """Return the name that a template gives its group; empty without a group."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return str(labels.get(GROUP) or "")


def _size(spec: HeteroTrainJobSpec) -> int:
    """Return the number of members: all workers that the pools may have."""
    return sum(pool.max_replicas for pool in spec.worker_pools)


def problem(template: Object, spec: HeteroTrainJobSpec) -> str:
    """Return why a job's pods cannot be a group, in one sentence; empty when they can or are none."""
    if not _group_name(template):
        return ""
    size = _size(spec)
    if least_workers(spec) != size:
        return (
            f"the label {GROUP} makes all workers one group, which Kueue admits as a whole: set "
            f"elasticPolicy.minReplicas to {size}, the sum of the pools' maxReplicas, or remove the label"
        )
    if len(spec.worker_pools) > MOST_ROLES:
        return f"a pod group of Kueue has at most {MOST_ROLES} roles: use at most {MOST_ROLES} worker pools"
    given = ((template.get("metadata") or {}).get("annotations") or {}).get(COUNT)
    if given is not None and given != str(size):
        return f"the annotation {COUNT} is {given}, but the job has {size} workers: leave it out, the operator sets it"
    return ""


def patch(pod: NewPod) -> PodPatch:
    """Return what makes a pod a member. A job's uid is in the name, so that one of the same name begins another group.

    Kueue makes the role the name of a set of pods, which has to be short.
    """
    if not (name := _group_name(pod.template)):
        return PodPatch()
    group = f"{name[:_MOST_PREFIX].rstrip('-.')}-{pod.job.uid[:_UID_CHARACTERS]}"
    role = hashlib.sha256(pod.pool.name.encode()).hexdigest()[:8]
    return PodPatch(labels={GROUP: group}, annotations={COUNT: str(_size(pod.job.spec)), ROLE: role, SERVING: "true"})


def together(job: ValidJob) -> bool:
    """Return whether the job's pods are a group."""
    return bool(_group_name(job.template))


def free_slots(job: ValidJob, pods: Sequence[PodView], leaving: Collection[str]) -> Places | None:
    """Return the places of a group; a pod has one as long as Kueue counts it (``isPodRunnableOrSucceeded``)."""
    if not _group_name(job.template):
        return None
    taken = [p.name for p in pods if _is_member(p) and p.phase != "Failed" and not (p.deleting and not p.node)]
    last = sorted(name for name in taken if name in leaving)
    reason = f"Kueue's group has no place before they are gone: {listed(last, most=_MOST_NAMED)}" if last else ""
    return Places(free=max(0, _size(job.spec) - len(taken)), reason=reason)


def edits(pods: Sequence[PodView], *, ended: bool) -> list[PodEdit]:
    """Let go of deleted members that only Kueue's finalizer keeps; pods that an ended job keeps end their group."""
    held = [pod for pod in pods if _is_member(pod) and FINALIZER in pod.finalizers]
    gone = [pod for pod in held if pod.deleting and (pod.phase_ended or not pod.node)]
    stay = [pod for pod in held if ended and not pod.deleting and (RETRIABLE, "false") not in pod.noted]
    over = {SERVING: None, RETRIABLE: "false"}
    return [PodEdit(pod=p, finalizer=FINALIZER) for p in gone] + [PodEdit(pod=p, annotations=over) for p in stay]


def _is_member(pod: PodView) -> bool:
    return any(key == GROUP and name for key, name in pod.noted)


def why_gated(gates: Sequence[str]) -> str:
    """Return what a pod with such gates waits for; empty for gates of others."""
    return "until Kueue admits it: see `kubectl describe workload`" if any(g.startswith(DOMAIN) for g in gates) else ""
