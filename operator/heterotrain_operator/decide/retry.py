"""Another try of a failed job, on request: the same job, so it continues from its own newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from heterotrain_core.uris import job_folder

from heterotrain_operator.api.conditions import ConditionType, condition_holds
from heterotrain_operator.cluster_state.saved import saved_by
from heterotrain_operator.cluster_state.views import JobView, PodView

_MOST_WORDS = 400


def asks_for_retry(job: JobView) -> bool:
    """Return whether a failed job is to be tried again, by a request that was not followed yet."""
    asked = bool(job.retry_request) and job.retry_request != job.status.internal.retried
    return asked and condition_holds(job.status.conditions, ConditionType.FAILED)


def tried_again(job: JobView) -> JobView:
    """Return a failed job as one that has not ended; its failures and deadlines count from now on."""
    internal = job.status.internal.model_copy(update={"retried": job.retry_request})
    others = tuple(each for each in job.status.conditions if each.type != ConditionType.FAILED.value)
    status = job.status.model_copy(
        update={
            "conditions": others,
            "restarts": 0,
            "start_time": None,
            "training_since": None,
            "completion_time": None,
            "nodes_with_failures": (),
            "internal": internal,
        }
    )
    return replace(job, status=status)


def with_way_on(job: JobView, pods: Iterable[PodView], message: str) -> str:
    """Return why a job has failed, with the command that tries it again and the folder that it continues from."""
    command = f"`heterotrain retry {job.key.name}`"
    told = (saved_by(pod) for pod in pods)
    steps = [saved.step for saved in (job.status.last_checkpoint, *told) if saved is not None]
    if job.spec is None or job.spec.checkpoint is None or not steps:
        return f"{message[:_MOST_WORDS]}; {command} starts it again"
    names = {"namespace": job.key.namespace, "name": job.key.name, "uid": job.uid}
    folder = job_folder(job.spec.checkpoint.uri, **names)
    return f"{message[:_MOST_WORDS]}; {command} continues it from step {max(steps)} in {folder}"
