"""The job's objects other than pods: PodDisruptionBudget, NetworkPolicy, Secret and the plan's ConfigMap."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Plan

from heterotrain_operator.api.network import Network
from heterotrain_operator.api.pools import CapacityType
from heterotrain_operator.cluster_state.parse import MOST_PLAN_CHARACTERS
from heterotrain_operator.cluster_state.views import Departed, JobView, ValidJob
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.workers.state import Worker, WorkerState


def labels_of(job: JobView) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {
        "app.kubernetes.io/name": "heterotrain",
        "app.kubernetes.io/instance": job.key.name,
        "app.kubernetes.io/part-of": "heterotrain",
        keys.LABEL_MANAGED_BY: keys.MANAGED_BY,
        keys.LABEL_JOB: job.key.name,
    }


def worker_selector(job: JobView) -> str:
    """Return the label selector of the job's workers, in text form."""
    return f"{keys.LABEL_MANAGED_BY}={keys.MANAGED_BY},{keys.LABEL_JOB}={job.key.name}"


def owner_reference(job: JobView) -> dict[str, Any]:
    """Return the owner reference: the garbage collector deletes an object together with its job."""
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}",
        "kind": keys.KIND,
        "name": job.key.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata_of(job: JobView, name: str) -> dict[str, Any]:
    """Return the metadata of an object that the job owns."""
    return {
        "name": name,
        "namespace": job.key.namespace,
        "labels": labels_of(job),
        "ownerReferences": [owner_reference(job)],
    }


def network_of(job: JobView) -> Network:
    """Return the job's network; the default one of an invalid job."""
    return job.spec.network if job.spec is not None else Network()


def build_plugin_objects(job: ValidJob) -> tuple[dict[str, Any], ...]:
    """Return the objects of plugins, which the job owns."""
    found = plugins.objects(job)
    return tuple({**body, "metadata": metadata_of(job, body["metadata"]["name"])} for body in found)


def build_disruption_budget(
    job: ValidJob, workers: Iterable[Worker], plan: Plan | None = None, *, planning: bool = False
) -> dict[str, Any] | None:
    """Return the budget that lets voluntary evictions take one member at a time; ``None`` without on-demand workers.

    A budget counts pods, and of two pods that are evicted, each may be in another member. So it allows one pod while
    several members are whole. Where one member is left, all its pods may go: the first that goes stops them all, and
    each later one would be a further pause.

    The minimum falls as soon as the job continues without the evicted worker, so a drain is slowed down, never blocked.
    Spot workers are left out: refusing their eviction would turn an announced loss into a sudden one. When
    the last on-demand pool becomes a spot pool, the budget falls as long as workers of the earlier kind are left.

    Args:
        job: the job.
        workers: all of its workers.
        plan: the plan in force.
        planning: whether members for the workers that are left are being planned.
    """
    workers = tuple(workers)
    if not any(worker.pod.on_demand for worker in workers) and all(
        pool.capacity_type is CapacityType.SPOT for pool in job.spec.worker_pools
    ):
        return None
    ready = sum(worker.state is WorkerState.READY and worker.pod.on_demand for worker in workers)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(job, keys.disruption_budget_name(job.key.name)),
        "spec": {
            "minAvailable": max(0, ready - _pods_that_may_go(workers, plan, ready, planning=planning)),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {
                    keys.LABEL_MANAGED_BY: keys.MANAGED_BY,
                    keys.LABEL_JOB: job.key.name,
                    keys.LABEL_CAPACITY_TYPE: keys.CAPACITY_ON_DEMAND,
                }
            },
        },
    }


def _pods_that_may_go(workers: Sequence[Worker], plan: Plan | None, ready: int, *, planning: bool) -> int:
    """Return how many of the ready on-demand workers may be evicted at the same time."""
    if plan is None or all(len(ranks) == 1 for ranks in plan.ranks_by_member):
        return 1
    uids = {worker.pod.uid for worker in workers if worker.state is WorkerState.READY}
    whole = plan.whole_members([rank.rank for rank in plan.ranks if rank.worker_uid in uids])
    if len(whole) > 1:
        return 1
    # The last whole member is kept only while the others are about to come back.
    broken = len(whole) < len(plan.members)
    return 0 if whole and broken and planning else ready


def build_network_policy(job: JobView, egress: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the policy that lets only the job's own workers reach its workers, and anybody the metrics ports.

    Policies add up: a user who needs further ports opens them by a policy of his own. The address of Prometheus is not
    known here, so the metrics ports are open to all. The kubelet's probes use the first of them. With ``egress``, the
    workers reach each other, DNS and what these rules allow, and nothing else.
    """
    workers = {"matchLabels": {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: job.key.name}}
    metrics = network_of(job).metrics_ports
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    out = {} if egress is None else {"egress": [{"to": [{"podSelector": workers}]}, dns, *egress]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(job, keys.network_policy_name(job.key.name)),
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress", *(["Egress"] if out else [])],
            **out,
            "ingress": [
                {"from": [{"podSelector": workers}]},
                {"ports": [{"protocol": "TCP", "port": metrics[0], "endPort": metrics[-1]}]},
            ],
        },
    }


def build_secret(job: JobView, value: bytes) -> dict[str, Any]:
    """Return the Secret by which the job's workers know each other; it cannot be changed once it exists."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(job, keys.secret_name(job.key.name)),
        "type": "Opaque",
        "immutable": True,
        "data": {keys.SECRET_KEY: base64.b64encode(value).decode()},
    }


def build_plan_object(
    job: JobView, plan: Plan, *, resource_version: str | None, departed: Sequence[Departed] = ()
) -> dict[str, Any]:
    """Return the plan's ConfigMap, to replace the one with ``resource_version``; ``None`` when there is none yet."""
    metadata = metadata_of(job, keys.plan_name(job.key.name))
    if departed:
        metadata["annotations"] = {keys.ANNOTATION_DEPARTED: json.dumps(departed)}
    if resource_version is not None:
        metadata["resourceVersion"] = resource_version
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {keys.PLAN_KEY: encode_plan(plan)}}


def plan_size_problem(plan: Plan, text: str) -> str:
    """Return why a plan can't be stored and what to do; empty when it fits into a ConfigMap.

    Args:
        plan: the plan.
        text: the same as JSON.
    """
    if len(text) <= MOST_PLAN_CHARACTERS:
        return ""
    fit = len(plan.ranks) * MOST_PLAN_CHARACTERS // len(text)
    return (
        f"the plan of {len(plan.ranks)} ranks is too large for a ConfigMap: about {fit} ranks fit, so lower "
        "elasticPolicy.maxReplicas, the pools' maxReplicas or numProcPerWorker, or use a shorter job name"
    )


def version_text(plan: Plan) -> str:
    """Return ``generation.revision``."""
    return f"{plan.generation}.{plan.revision}"
