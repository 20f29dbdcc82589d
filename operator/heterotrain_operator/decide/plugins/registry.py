"""The plugins by what they have a say in, and the sum of what they say. Nothing outside this folder names them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.views import PodView, ValidJob
from heterotrain_operator.decide.plugins.claimed_devices import plugin as claimed_devices
from heterotrain_operator.decide.plugins.interface import NewPod, Object, Places, PodEdit, PodPatch
from heterotrain_operator.decide.plugins.kueue import plugin as kueue
from heterotrain_operator.decide.plugins.pod_groups import plugin as pod_groups

_PROBLEM = (kueue.problem,)
_PATCH = (kueue.patch, pod_groups.patch, claimed_devices.patch)
_OBJECTS = (pod_groups.objects,)
_TOGETHER = (kueue.together, pod_groups.together)
_FREE_SLOTS = (kueue.free_slots,)
_EDITS = (kueue.edits,)
_WHY_GATED = (kueue.why_gated,)


def problem(template: Object, spec: HeteroTrainJobSpec) -> str:
    """Return why a job with this template can't run, in one sentence; empty when it can."""
    return next(filter(None, (each(template, spec) for each in _PROBLEM)), "")


def patch(pod: NewPod) -> PodPatch:
    """Return what a new pod gets besides."""
    found = [each(pod) for each in _PATCH]
    return PodPatch(
        labels={name: value for each in found for name, value in each.labels.items()},
        annotations={name: value for each in found for name, value in each.annotations.items()},
        scheduler_name=next((each.scheduler_name for each in found if each.scheduler_name), ""),
    )


def objects(job: ValidJob) -> list[Object]:
    """Return the objects that a running job has and an inactive one has not; of their metadata, the name."""
    return [body for each in _OBJECTS for body in each(job)]


def step_without(kind: str) -> str:
    """Return what to do in a cluster without this kind of object; empty for a kind that every cluster has."""
    return pod_groups.STEP_WITHOUT.get(kind, "")


def together(job: ValidJob) -> bool:
    """Return whether a job's workers are admitted together or not at all, so that none can show that it starts."""
    return any(each(job) for each in _TOGETHER)


def free_slots(job: ValidJob, pods: Sequence[PodView], leaving: Collection[str]) -> Places | None:
    """Return how many pods a job may create, by its pods and the names of those that leave; ``None`` for any number."""
    found = [places for each in _FREE_SLOTS if (places := each(job, pods, leaving)) is not None]
    return min(found, key=lambda places: places.free, default=None)


def edits(pods: Sequence[PodView], *, ended: bool) -> tuple[PodEdit, ...]:
    """Return what to change of a job's pods; ``ended`` is whether the job has."""
    return tuple(edit for each in _EDITS for edit in each(pods, ended=ended))


def why_gated(gates: Sequence[str]) -> str:
    """Return what a pod with these scheduling gates waits for; empty for gates of others."""
    return next(filter(None, (each(gates) for each in _WHY_GATED)), "")
