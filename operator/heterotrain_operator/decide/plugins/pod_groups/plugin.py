"""The job's PodGroup, and what makes a pod its member, for each scheduler with groups.

Sources of the names: Volcano, "PodGroup"; KAI scheduler, "External PodGroups"; scheduler-plugins, "Coscheduling".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract import keys

from heterotrain_operator.api.pod_group import GroupScheduler
from heterotrain_operator.api.reading import least_workers
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.plugins.interface import NewPod, PodPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """A scheduler's groups.

    Attributes:
        api_version: of its PodGroups.
        member: what makes a pod a member, from the group's name; with the scheduler's name in its usual installation.
        has_priority: whether its PodGroups have a ``priorityClassName``.
    """

    api_version: str
    member: Callable[[str], PodPatch]
    has_priority: bool = True


STEP_WITHOUT = {"PodGroup": "install the scheduler that spec.podGroup.scheduler names, or remove spec.podGroup"}
"""What to do in a cluster without this kind."""
_GROUPS: Mapping[GroupScheduler, _Groups] = {
    GroupScheduler.VOLCANO: _Groups(
        api_version="scheduling.volcano.sh/v1beta1",
        # With the first one, Volcano's controller makes no group of its own; releases differ in which one they read.
        member=lambda name: PodPatch(
            annotations={"scheduling.k8s.io/group-name": name, "scheduling.volcano.sh/group-name": name},
            scheduler_name="volcano",
        ),
    ),
    GroupScheduler.KAI: _Groups(
        api_version="scheduling.run.ai/v2alpha2",
        # Without the second one, KAI's pod grouper would make a group from the job as it understands it.
        member=lambda name: PodPatch(
            annotations={"pod-group-name": name, "kai.scheduler/skip-podgrouper": "true"},
            scheduler_name="kai-scheduler",
        ),
    ),
    GroupScheduler.COSCHEDULING: _Groups(
        api_version="scheduling.x-k8s.io/v1alpha1",
        member=lambda name: PodPatch(
            labels={"scheduling.x-k8s.io/pod-group": name}, scheduler_name="scheduler-plugins-scheduler"
        ),
        has_priority=False,
    ),
}


def patch(pod: NewPod) -> PodPatch:
    """Return what makes a pod a member of the job's group."""
    chosen = pod.job.spec.pod_group
    return PodPatch() if chosen is None else _GROUPS[chosen.scheduler].member(keys.pod_group_name(pod.job.key.name))


def together(job: ValidJob) -> bool:
    """Return whether the job's pods are a group."""
    return job.spec.pod_group is not None


def objects(job: ValidJob) -> tuple[dict[str, Any], ...]:
    """Return the job's group, if it has one."""
    if (chosen := job.spec.pod_group) is None:
        return ()
    groups = _GROUPS[chosen.scheduler]
    priority = (job.template.get("spec") or {}).get("priorityClassName")
    spec = {
        "minMember": least_workers(job.spec),
        **({"queue": chosen.queue} if chosen.queue is not None else {}),
        **({"priorityClassName": priority} if priority and groups.has_priority else {}),
    }
    metadata = {"name": keys.pod_group_name(job.key.name)}
    return ({"apiVersion": groups.api_version, "kind": "PodGroup", "metadata": metadata, "spec": spec},)
