"""Finds mistakes in a job's file that the API server takes: its pods would be refused, or never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from heterotrain_operator.api.text import listed, quoted
from heterotrain_operator.cluster_state.parse import template_patches
from heterotrain_operator.decide.objects.pods import patched

from heterotrain_cli.documents import place
from heterotrain_cli.errors import InputError
from heterotrain_cli.job_file import JobFile, read_job_file


def read_checked_job(path: str) -> JobFile:
    """Return the job of a file that is to run on a cluster now.

    Raises:
        InputError: as ``read_job_file``, or the job's pods would be refused, or its deadline has passed.
    """
    job = read_job_file(path)
    if problem := mistake(job, datetime.now(UTC)):
        raise InputError(f"{place(path)}: {problem}")
    return job


def mistake(job: JobFile, now: datetime) -> str:
    """Return the first mistake in one sentence; empty without one."""
    return next(_mistakes(job, now), "")


def notes(job: JobFile) -> Sequence[str]:
    """Return what is allowed, but may not be meant."""
    most, pools = job.spec.elastic_policy.max_replicas, sum(pool.max_replicas for pool in job.spec.worker_pools)
    if most is None or most <= pools:
        return ()
    return (f"spec.elasticPolicy.maxReplicas is {most}, but the pools hold {pools} workers: no more than these run",)


def _mistakes(job: JobFile, now: datetime) -> Iterator[str]:
    template, patches = job.body["spec"]["template"], template_patches(job.body["spec"])
    for pool in job.spec.worker_pools:
        of_pool = f"pool {pool.name}: " if pool.name in patches else ""
        pod = patched(template, patches, pool).get("spec") or {}
        yield from (f"{of_pool}{each}" for each in _mistakes_of_pod(pod))
    if job.spec.deadline is not None and job.spec.deadline <= now:
        yield f"spec.deadline {job.spec.deadline.isoformat()} has passed: give a later time"


def _mistakes_of_pod(pod: Mapping[str, Any]) -> Iterator[str]:
    volumes = [str(each.get("name")) for each in pod.get("volumes") or ()]
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind) or ():
            name = quoted(str(container.get("name")))
            if not container.get("image"):
                yield f"container {name} has no image: give its field image"
            for mount in container.get("volumeMounts") or ():
                if mount.get("name") not in volumes:
                    there = f"has {listed(volumes, most=4)}" if volumes else "is empty"
                    yield (
                        f"container {name} mounts the volume {quoted(str(mount.get('name')))}, but "
                        f"spec.template.spec.volumes {there}: add it there"
                    )
