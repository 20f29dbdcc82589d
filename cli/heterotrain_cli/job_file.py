"""Reading a HeteroTrainJob from a file, with everything checked that the API server checks.

Some mistakes it takes, although the pods would be refused, or never run: these are found here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_operator.api.admission import job_name, read_new_job
from heterotrain_operator.api.reading import SpecError
from heterotrain_operator.api.text import listed, quoted
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.parse import template_patches
from heterotrain_operator.decide.objects.pods import patched, problem_of_templates

from heterotrain_cli.documents import parse_documents, place, read_text
from heterotrain_cli.errors import InputError

API_VERSION = f"{keys.GROUP}/{keys.VERSION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A valid job.

    Attributes:
        name, namespace: of the object; the namespace is ``None`` if the file has none.
        body: the object as written.
        spec: its spec.
    """

    name: str
    namespace: str | None
    body: Mapping[str, Any]
    spec: HeteroTrainJobSpec


def read_job_file(path: str) -> JobFile:
    """Return the one HeteroTrainJob in a YAML file (``-``: standard input); other objects are ignored.

    Raises:
        InputError: the file has no job or several, or the job has a mistake.
    """
    where = place(path)
    documents = parse_documents(read_text(path), where=where)
    jobs = [d for d in documents if isinstance(d, Mapping) and d.get("kind") == keys.KIND]
    if len(jobs) != 1:
        raise InputError(f"{where}: {_not_one(documents, path)}")
    body = jobs[0]
    if body.get("apiVersion") != API_VERSION:
        raise InputError(f"{where}: apiVersion is {body.get('apiVersion')!r}, but must be {API_VERSION}")
    try:
        spec = checked_spec(body)
    except SpecError as error:
        raise InputError(f"{where}: {error}") from error
    metadata = body["metadata"]
    return JobFile(name=job_name(metadata), namespace=metadata.get("namespace"), body=body, spec=spec)


def checked_spec(body: Mapping[str, Any]) -> HeteroTrainJobSpec:
    """Return the spec of a new job that the API server admits, and whose pods it would admit.

    Raises:
        SpecError: it would refuse them.
    """
    spec = read_new_job(body)
    if problem := problem_of_templates(body["spec"]["template"], spec, template_patches(body["spec"])):
        raise SpecError(problem)
    return spec


def _not_one(documents: Sequence[Any], path: str) -> str:
    """Return why the documents are not one job, and the next step."""
    objects = [each for each in documents if isinstance(each, Mapping)]
    kinds = [quoted(str(each["kind"])) for each in objects if "kind" in each]
    if (count := kinds.count(keys.KIND)) > 1:
        return f"holds {count} objects of kind {keys.KIND}: give one file for each"
    from heterotrain_cli.convert.sources import format_of  # noqa: PLC0415  # a valid file needs no converter

    convertible = [format_of(each) for each in objects if format_of(each)]
    if convertible:
        return f"holds a {convertible[0]}: `heterotrain init --from {path}` writes a {keys.KIND} from it"
    if any({"members", "units", "workload"} & each.keys() for each in objects):
        return f"must hold one {keys.KIND}, but this is a file for `heterotrain forecast`"
    held = listed(kinds, most=4) if kinds else "no object"
    return f"must hold exactly one {keys.KIND}, but holds {held}: `heterotrain init SCRIPT.PY` writes one"


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
