"""The job's PodGroup, and what makes a pod its member, for each scheduler with groups.

Sources of the names: Volcano, "PodGroup"; KAI scheduler, "External PodGroups"; scheduler-plugins, "Coscheduling".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract import keys

from heterotrain_operator.api.pod_group import GroupScheduler
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import metadata_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """A scheduler's groups.

    Attributes:
        api_version: of its PodGroups.
        scheduler_name: that its installation has by default.
        annotations: of a member, from the group's name.
        labels: likewise.
        has_priority: whether its PodGroups have a ``priorityClassName``.
    """

    api_version: str
    scheduler_name: str
    annotations: Callable[[str], dict[str, str]] = lambda _: {}
    labels: Callable[[str], dict[str, str]] = lambda _: {}
    has_priority: bool = True


_GROUPS: Mapping[GroupScheduler, _Groups] = {
    GroupScheduler.VOLCANO: _Groups(
        api_version="scheduling.volcano.sh/v1beta1",
        scheduler_name="volcano",
        # With the first one, Volcano's controller makes no group of its own; releases differ in which one they read.
        annotations=lambda name: {"scheduling.k8s.io/group-name": name, "scheduling.volcano.sh/group-name": name},
    ),
    GroupScheduler.KAI: _Groups(
        api_version="scheduling.run.ai/v2alpha2",
        scheduler_name="kai-scheduler",
        # Without the second one, KAI's pod grouper would make a group from the job as it understands it.
        annotations=lambda name: {"pod-group-name": name, "kai.scheduler/skip-podgrouper": "true"},
    ),
    GroupScheduler.COSCHEDULING: _Groups(
        api_version="scheduling.x-k8s.io/v1alpha1",
        scheduler_name="scheduler-plugins-scheduler",
        labels=lambda name: {"scheduling.x-k8s.io/pod-group": name},
        has_priority=False,
    ),
}


def least_members(spec: HeteroTrainJobSpec) -> int:
    """Return how many workers have to have nodes before training starts."""
    return max(spec.elastic_policy.min_replicas, sum(pool.min_replicas for pool in spec.worker_pools))


def build_pod_group(job: ValidJob) -> dict[str, Any] | None:
    """Return the job's PodGroup; ``None`` for a job without one."""
    if (chosen := job.spec.pod_group) is None:
        return None
    groups = _GROUPS[chosen.scheduler]
    priority = (job.template.get("spec") or {}).get("priorityClassName")
    return {
        "apiVersion": groups.api_version,
        "kind": "PodGroup",
        "metadata": metadata_of(job, keys.pod_group_name(job.key.name)),
        "spec": {
            "minMember": least_members(job.spec),
            **({"queue": chosen.queue} if chosen.queue is not None else {}),
            **({"priorityClassName": priority} if priority and groups.has_priority else {}),
        },
    }


def group_annotations(job: ValidJob) -> dict[str, str]:
    """Return the annotations of a member of the job's group; none without a group."""
    chosen = job.spec.pod_group
    return {} if chosen is None else _GROUPS[chosen.scheduler].annotations(keys.pod_group_name(job.key.name))


def group_labels(job: ValidJob) -> dict[str, str]:
    """Return the labels of a member of the job's group; none without a group."""
    chosen = job.spec.pod_group
    return {} if chosen is None else _GROUPS[chosen.scheduler].labels(keys.pod_group_name(job.key.name))


def scheduler_name(job: ValidJob) -> str:
    """Return the scheduler of the job's group; empty without a group."""
    return "" if job.spec.pod_group is None else _GROUPS[job.spec.pod_group.scheduler].scheduler_name
