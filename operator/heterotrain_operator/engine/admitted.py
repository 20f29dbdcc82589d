"""What the API server's admission makes of the pods of each job: learned from dry runs, by job and pool.

LimitRanges, runtime classes, PriorityClasses and webhooks change a pod when it is created. The operator reads none of
them. The answer to a dry run has the outcome.
"""

from __future__ import annotations

from collections.abc import Mapping

from heterotrain_operator.cluster_state.views import JobKey, JobView
from heterotrain_operator.decide.workers.capacity import AdmittedPod

_Version = tuple[str, int]


class AdmittedPods:
    """The newest answers, each for one generation of a job's spec."""

    def __init__(self) -> None:
        self._found: dict[JobKey, tuple[_Version, Mapping[str, AdmittedPod]]] = {}

    def put(self, job: JobView, found: Mapping[str, AdmittedPod]) -> None:
        """Keep what is known about the pods of a job, by pool."""
        self._found[job.key] = ((job.uid, job.generation), found)

    def of(self, job: JobView) -> Mapping[str, AdmittedPod]:
        """Return by pool what is known about the pods of this generation."""
        version, found = self._found.get(job.key, (None, {}))
        return found if version == (job.uid, job.generation) else {}

    def forget(self, key: JobKey) -> None:
        """Forget a job."""
        self._found.pop(key, None)
