"""Learns what the API server's admission makes of each job's pods, from dry runs, by job and pool.

LimitRanges, runtime classes, PriorityClasses and webhooks change a pod when it is created. The operator reads none of
them. The answer to a dry run has the outcome.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.views import JobKey, JobView, ValidJob
from heterotrain_operator.decide.objects.pods import build_pod
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


def digest_of_any_job(job: ValidJob, pool: WorkerPool) -> bytes:
    """Return a digest of a worker's pod that is the same for jobs with the same template, pool and settings."""
    anonymous = replace(job, key=job.key._replace(name="job"), uid="uid")
    pod = build_pod(anonymous, pool, 0, plan_version="")
    return hashlib.sha256(json.dumps(pod, sort_keys=True, default=str).encode()).digest()
