"""Common parts of pods: what all ranks of a running job must share, and the template in force.

A pod carries a digest of what the user wrote about it, so that one that has never run can be made again after a
correction. Image, command, environment, volumes and settings of the training are different: two versions of them in one
job would train something that nobody has asked for. So those of the running workers stay in force, also for their
replacements, until no worker runs that was made from them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.containers import training_container
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.pod_source import PodSource
from heterotrain_operator.decide.objects.pods import template_of
from heterotrain_operator.decide.objects.training_settings import grace_s_of, settings_text, stores_after
from heterotrain_operator.decide.workers.state import Worker, WorkerState

Common = Mapping[str, Any]
"""The common part of one pool's pods: ``main`` (the training container), ``volumes``, ``init``, ``settings``."""
MOST_BYTES = 256 * 1024
"""Of the common parts of all pools, compressed: they are kept in the job's status."""
_MOST_READ = 16 << 20
_DIGEST_CHARACTERS = 16
_OF_EACH_POD = frozenset({"resources", "ports", "livenessProbe", "startupProbe", "lifecycle"})
"""Fields of the training container in which ranks may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSources:
    """What new pods are made from.

    Attributes:
        by_pool: by pool; its common part is that in force.
        wanted: by pool, the digest of a pod that has all of the spec as it is now.
        changed: common parts that the spec has otherwise by now, such as ``image``; empty when all are in force.
        kept: the common parts in force as the status keeps them; empty where they are too large to be kept.
        stores: where new workers keep checkpoints, and where the job kept them before.
    """

    by_pool: Mapping[str, PodSource]
    wanted: Mapping[str, str]
    changed: tuple[str, ...] = ()
    kept: str = ""
    stores: tuple[str, ...] = ()


def common_part(job: ValidJob, pool: WorkerPool) -> Common:
    """Return what the pods of a pool must have in common with those that they train with."""
    template = template_of(job, pool)
    spec, main = template.get("spec") or {}, training_container(template)
    return {
        "main": {field: value for field, value in main.items() if field not in _OF_EACH_POD},
        "volumes": spec.get("volumes") or [],
        "init": spec.get("initContainers") or [],
        "settings": settings_text(job, grace_s=grace_s_of(spec)),
    }


def _digest(job: ValidJob, pool: WorkerPool, common: Common) -> str:
    """Return a digest of what a user wrote about a pool's pods, where ``common`` is in force.

    The same text gives the same digest with any version of the operator that has the same defaults.
    """
    place = {"node_selector", "tolerations", "resources", "capacity_type", "num_proc_per_worker"}
    said = [
        _with_common(template_of(job, pool), common),
        pool.model_dump(mode="json", exclude_defaults=True, include=place),
        common["settings"],
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def wanted_digest(job: ValidJob, pool: WorkerPool) -> str:
    """Return the digest of a pod that has all of the spec as it is now."""
    return _digest(job, pool, common_part(job, pool))


def _with_common(template: Mapping[str, Any], common: Common) -> dict[str, Any]:
    """Return a template with the common part in place of its own; the given one stays as it is.

    Volumes that only the template has stay, because its other containers may mount them.
    """
    spec, main = template.get("spec") or {}, training_container(template)
    containers = []
    for container in spec.get("containers") or ():
        if container is main:
            own = {field: value for field, value in container.items() if field in _OF_EACH_POD}
            containers.append({**common["main"], "name": main.get("name"), **own})
        else:
            containers.append(container)
    known = {volume.get("name") for volume in common["volumes"]}
    added = [volume for volume in spec.get("volumes") or () if volume.get("name") not in known]
    lists = {"volumes": [*common["volumes"], *added], "initContainers": list(common["init"])}
    given = {field: values for field, values in lists.items() if values or field in spec}
    return {**template, "spec": {**spec, "containers": containers, **given}}


def pod_sources(job: ValidJob, workers: Iterable[Worker]) -> PodSources:
    """Return what new pods are made from: the spec, with the common parts of running workers that have others.

    A pool without a running worker may get another image, as long as the pools that run keep what they have.
    """
    pools = job.spec.worker_pools
    wanted = {pool.name: common_part(job, pool) for pool in pools}
    running = {worker.pod.pool for worker in workers if runs(worker)}
    kept = unpacked(job.status.internal.common_parts or "") if running else {}
    held = [name for name in sorted(running) if name in kept and name in wanted and kept[name] != wanted[name]]
    in_force = {name: kept.get(name, each) if held else each for name, each in wanted.items()}
    digests = {pool.name: _digest(job, pool, wanted[pool.name]) for pool in pools}
    sources = {
        pool.name: PodSource(
            template=_with_common(template_of(job, pool), in_force[pool.name]),
            settings=in_force[pool.name]["settings"],
            digest=_digest(job, pool, in_force[pool.name]) if held else digests[pool.name],
            restart=job.restart_request,
        )
        for pool in pools
    }
    return PodSources(
        by_pool=sources,
        wanted=digests,
        changed=tuple(dict.fromkeys(what for name in held for what in _differences(kept[name], wanted[name]))),
        kept=(job.status.internal.common_parts or "") if kept == in_force else packed(in_force),
        stores=stores_after(job, json.loads(in_force[pools[0].name]["settings"]).get("checkpoint_uri")),
    )


def runs(worker: Worker) -> bool:
    """Return whether a worker's training container has started and may still train."""
    return not worker.ended and worker.state is not WorkerState.LOST and (worker.pod.ready or worker.pod.main_started)


def size_problem(job: ValidJob) -> str:
    """Return in one sentence that a job's pods have too much in common to be kept; empty where they have not."""
    if packed({pool.name: common_part(job, pool) for pool in job.spec.worker_pools}):
        return ""
    return (
        f"spec.template has too much text (more than {MOST_BYTES >> 10} KiB compressed): put long values and scripts "
        "into a ConfigMap or the image"
    )


def packed(parts: Mapping[str, Common]) -> str:
    """Return common parts as text for the status; empty for parts that are too large."""
    data = zlib.compress(json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str).encode())
    return base64.b64encode(data).decode() if len(data) <= MOST_BYTES else ""


def unpacked(text: str) -> dict[str, Common]:
    """Return the parts in such a text; none in one that cannot be read."""
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(text, validate=True), _MOST_READ)
        found = json.loads(data) if reader.eof else {}
    except (ValueError, zlib.error, RecursionError):
        return {}
    names = {"main", "volumes", "init", "settings"}
    return {name: each for name, each in found.items() if isinstance(each, dict) and set(each) == names}


def _differences(before: Common, now: Common) -> list[str]:
    """Return what differs between two common parts, in words."""
    fields = sorted({*before["main"], *now["main"]})
    found = [field for field in fields if before["main"].get(field) != now["main"].get(field)]
    if before["volumes"] != now["volumes"]:
        found.append("volumes")
    if before["init"] != now["init"]:
        found.append("initContainers")
    if before["settings"] != now["settings"]:
        old, new = json.loads(before["settings"]), json.loads(now["settings"])
        found += sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return found
