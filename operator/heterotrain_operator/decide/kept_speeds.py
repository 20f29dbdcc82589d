"""Speeds that outlive their job, in one ConfigMap of its namespace: the next job of the same program starts with them.

A speed belongs to a program on a pool: the digest of its image, its pod's whole template, and what else changes the
time of a step. Another namespace has a ConfigMap of its own. Users of the namespace may edit this one, so all that is
read has bounds, and what cannot be read is left out.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Parallelism, Runtime
from heterotrain_planner.planning.kept_speed import (
    KeptSpeed,
    holds_for,
    kept_speed,
    middle_speed,
)

from heterotrain_operator.api.kept_speed import LARGEST_VARIATION, KeptEntry, KeptShare, read_entry
from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.text import rounded
from heterotrain_operator.cluster_state.containers import training_container
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, PodView, ValidJob
from heterotrain_operator.decide.objects.common_parts import wanted_digest
from heterotrain_operator.decide.objects.pods import template_of
from heterotrain_operator.decide.plan.arrangement import identities_of
from heterotrain_operator.decide.plan.shares import Shares

NAME = "heterotrain-speeds"
"""Of the ConfigMap. Deleting it forgets all speeds of its namespace."""
MOST_ENTRIES = 32
"""Speeds of a namespace; those that were written the longest ago go first."""
_MOST_READ = 2 * MOST_ENTRIES
_DIGEST_CHARACTERS = 24
_OF_POOL = {"name", "node_selector", "tolerations", "resources", "capacity_type"}
_OF_POOL |= {"num_proc_per_worker", "micro_batch_size"}


def entry_of(speed: KeptSpeed, *, pool: str, job: str, now_s: float) -> KeptEntry:
    """Return a speed as it is written."""
    line = speed.compute
    return KeptEntry(
        pool=pool,
        job=job,
        written_s=round(now_s),
        per_sample_seconds=rounded(line.per_sample_s),
        fixed_seconds=rounded(line.fixed_s),
        backward_per_sample_seconds=rounded(line.backward_per_sample_s),
        backward_fixed_seconds=rounded(line.backward_fixed_s),
        update_seconds=rounded(line.update_s),
        variation=rounded(min(speed.variation, LARGEST_VARIATION)),
        shares=tuple(
            KeptShare(samples=each.share_samples, micro_batches=each.micro_batches, steps=each.steps)
            for each in speed.seen
        ),
    )


def learned_speeds(shares: Shares | None, telemetry: Telemetry) -> dict[str, KeptSpeed]:
    """Return by pool the speed of its middle member, as far as the members' own steps show it."""
    found: dict[str, list[KeptSpeed]] = {}
    if shares is None or shares.decision is None:
        return {}
    rows = zip(shares.plan.members, identities_of(shares.plan), shares.decision.models, strict=True)
    for member, ranks, model in rows:
        speed = kept_speed(model, member.compute, telemetry.observations.get(ranks[0], ()))
        if speed is not None:
            found.setdefault(member.pool, []).append(speed)
    return {pool: speed for pool, each in found.items() if (speed := middle_speed(each)) is not None}


def keeps_speeds(job: JobView) -> TypeGuard[ValidJob]:
    """Return whether a job's members are single ranks with the whole model, so that the next job's are alike."""
    if not isinstance(job, ValidJob):
        return False
    by_speed = job.spec.runtime is Runtime.HETEROTRAIN and not job.spec.training.rebalance.keeps_even
    return by_speed and job.spec.parallelism.mode is Parallelism.DATA


def keys_by_pool(job: ValidJob, pods: Sequence[PodView]) -> dict[str, str]:
    """Return by pool the key of its speed; a pool without a running pod, or with pods of several programs, has none."""
    found = {}
    for pool in job.spec.worker_pools:
        mine = [pod for pod in pods if pod.pool == pool.name and pod.owner_uid == job.uid and pod.image_digest]
        images = {pod.image_digest for pod in mine}
        if len(images) == 1 and {pod.template for pod in mine} == {wanted_digest(job, pool)}:
            found[pool.name] = _key(job, pool, images.pop())
    return found


def _key(job: ValidJob, pool: WorkerPool, image: str) -> str:
    template = copy.deepcopy(dict(template_of(job, pool)))
    training_container(template)["image"] = image  # a tag may be moved, and two tags may name one image
    pod = template["spec"]
    for container in pod["containers"]:
        for mount in container.get("volumeMounts") or ():
            mount.pop("subPath", None)
    pod["volumes"] = [_without_place(volume) for volume in pod.get("volumes") or ()]
    training = job.spec.training
    said = [
        pod,
        pool.model_dump(mode="json", include=_OF_POOL),
        job.spec.parallelism.model_dump(mode="json"),
        training.model_dump(mode="json", include={"precision", "communication"}),
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), default=str)
    return f"{pool.name}.{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"


def _without_place(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Return a volume without the folder or claim that it is: each job may have its own. A script is in a ConfigMap."""
    return {key: value if key in ("name", "configMap") else "" for key, value in volume.items()}


def read_entries(data: Mapping[str, str]) -> tuple[dict[str, KeptEntry], str]:
    """Return the first entries of a ConfigMap by key, and which of them are ignored and why, in one clause."""
    found: dict[str, KeptEntry] = {}
    problems = []
    for key, text in islice(data.items(), _MOST_READ):
        entry = read_entry(text)
        if isinstance(entry, KeptEntry):
            found[key] = entry
        else:
            problems.append(f"{key} ({entry})")
    return found, f"entries without sense are ignored, such as {problems[0]}" if problems else ""


def config_map(namespace: str, known: Mapping[str, Any], new: Mapping[str, KeptEntry]) -> dict[str, Any] | None:
    """Return the ConfigMap with new entries besides those that it has; ``None`` for one that belongs to others.

    Args:
        namespace: of the jobs.
        known: the ConfigMap as it is; empty for none.
        new: by key, at least one.
    """
    labels = {"app.kubernetes.io/name": "heterotrain", keys.LABEL_MANAGED_BY: keys.MANAGED_BY}
    metadata = {"name": NAME, "namespace": namespace, "labels": labels}
    if known:
        metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
        if (known["metadata"].get("labels") or {}).get(keys.LABEL_MANAGED_BY) != keys.MANAGED_BY:
            return None
    entries = {**read_entries(known.get("data") or {})[0], **new}
    now_s = max(entry.written_s for entry in new.values())
    # Entries of the future go first: written by a user or a wrong clock, they would keep all others out for good.
    kept = sorted(entries, key=lambda key: (entries[key].written_s <= now_s, entries[key].written_s, key))
    text = {key: entries[key].model_dump_json(by_alias=True) for key in sorted(kept[-MOST_ENTRIES:])}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": text}


def usable_speeds(job: ValidJob, pods: Collection[PodView], found: Mapping[str, KeptSpeed]) -> Mapping[str, KeptSpeed]:
    """Return the speeds by pool with which a job may start: all of them, or none.

    A speed that is not known would be guessed from the others. And where the job's batch is far from those that the
    speeds were measured with, even shares teach more than a guess.
    """
    running = [pod for pod in pods if pod.owner_uid == job.uid and pod.image_digest and not pod.terminal]
    if not all(pod.pool in found for pod in running):
        return {}
    members = [found[pod.pool] for pod in running for _ in range(pod.ranks)]
    return found if holds_for(job.spec.training.base_batch_samples, members) else {}
