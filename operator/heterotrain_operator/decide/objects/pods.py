"""The pod of one worker: the user's complete template, with additions from the pool and the plan contract."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from heterotrain_core.contract import env, keys
from heterotrain_core.contract.choices import Parallelism, Runtime

from heterotrain_operator.api.network import Network
from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.template import LIMITED_BY_JOB, REPLACED_BY_US, SCHEDULED_BY_POOL
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.containers import DEFAULT_CONTAINER, training_container
from heterotrain_operator.cluster_state.parse import (
    AVOIDS_ANNOTATION,
    RANKS_ANNOTATION,
    RESTART_ANNOTATION,
    TEMPLATE_ANNOTATION,
)
from heterotrain_operator.cluster_state.quantity import MORE_REQUESTS, pod_requests
from heterotrain_operator.cluster_state.views import JobView, ValidJob
from heterotrain_operator.decide.objects.accelerators import accelerators, slices_problem, unusable_problem
from heterotrain_operator.decide.objects.objects import labels_of, owner_reference
from heterotrain_operator.decide.objects.pod_source import PodSource
from heterotrain_operator.decide.objects.pool_template import merged
from heterotrain_operator.decide.objects.training_settings import grace_s_of, settings_text
from heterotrain_operator.decide.plugins import registry as plugins
from heterotrain_operator.decide.plugins.interface import NewPod
from heterotrain_operator.decide.workers.node_affinity import NODE_NAME, REQUIRED, label_keys, required_terms

LOST_NODE_TOLERATION_S = 10
"""Seconds that a pod stays bound to an unreachable node; the cluster's default is 300."""
_OWN_ANNOTATIONS = frozenset({AVOIDS_ANNOTATION, MORE_REQUESTS, TEMPLATE_ANNOTATION, RESTART_ANNOTATION})
_PEER_PORT_NAME_PREFIX = "ht-peer-"
_DNS_ON_HOST = "ClusterFirstWithHostNet"
_SHM_PATH = "/dev/shm"  # noqa: S108  # a mount point in the pod


def template_of(job: JobView, pool: WorkerPool) -> Mapping[str, Any]:
    """Return the template of a pool's pods: the job's, with the pool's patch."""
    return patched(job.template, job.patches, pool)


def patched(
    template: Mapping[str, Any], patches: Mapping[str, Mapping[str, Any]], pool: WorkerPool
) -> Mapping[str, Any]:
    """Return the template of a pool's pods from the job's template and the patches of all pools."""
    patch = patches.get(pool.name)
    return merged(template, patch) if patch else template


def problem_of_templates(
    template: Mapping[str, Any], spec: HeteroTrainJobSpec, patches: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return what makes the template of the job or of a pool unusable, in one sentence; empty when all are usable."""
    pools, network = spec.worker_pools, spec.network
    plain = [pool for pool in pools if pool.name not in patches]
    if problem := template_problem(template, plain, network=network):
        return problem
    if problem := plugins.problem(template, spec):
        return problem
    found = (
        (pool.name, template_problem(patched(template, patches, pool), (pool,), network=network))
        for pool in pools
        if pool not in plain
    )
    if problem := next((f"pool {name}: {problem}" for name, problem in found if problem), ""):
        return problem
    if spec.runtime is Runtime.TORCHRUN:  # such a script chooses its device itself
        return ""
    every = (unusable_problem(pool, patched(template, patches, pool)) for pool in pools)
    return next(filter(None, every), "")


def template_problem(
    template: Mapping[str, Any],
    pools: Sequence[WorkerPool] = (),
    *,
    network: Network | None = None,
) -> str:
    """Return what makes a template unusable for the operator, in one sentence; empty when it is usable.

    A dry run of the real pod finds what the API server itself refuses.

    Args:
        template: a pod template.
        pools: the worker pools that use it.
        network: the workers' ports; ``None`` for those by default.
    """
    spec = template.get("spec") or {}
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    names = [container.get("name") for container in spec.get("containers") or ()]
    if not names:
        return "spec.template.spec.containers is empty: name the container that trains"
    chosen = annotations.get(DEFAULT_CONTAINER)
    if chosen is not None and chosen not in names:
        return f"the annotation {DEFAULT_CONTAINER} names {chosen!r}, but the containers are {names}: correct it"
    refused = {
        REPLACED_BY_US: spec.get("restartPolicy") not in (None, "Never"),
        SCHEDULED_BY_POOL: spec.get("nodeName"),
        LIMITED_BY_JOB: spec.get("activeDeadlineSeconds") is not None,
    }
    for problem, found in refused.items():
        if found:
            return problem
    main = training_container(template)
    if "readinessProbe" in main:
        return f"container {main['name']} has a readinessProbe: remove it, because the operator adds its own"
    for port in main.get("ports") or ():
        if str(port.get("name", "")).startswith(keys.METRICS_PORT_NAME_PREFIX):
            return f"the port name {port['name']} belongs to the operator: give the port another name"
    if problem := _port_problem(spec, main["name"], network or Network()):
        return problem
    try:
        pod_requests(spec)
    except ValueError as error:
        return f"spec.template requests resources that cannot be read: {error}"
    for pool in pools:
        if problem := slices_problem(pool, template):
            return problem
        if (count := accelerators(pool, template)) > MAX_NUM_PROC_PER_WORKER and pool.num_proc_per_worker is None:
            return (
                f"a worker of pool {pool.name} requests {count} accelerators, but runs at most "
                f"{MAX_NUM_PROC_PER_WORKER} ranks: lower resources.limits, or set numProcPerWorker if they are not "
                "accelerators"
            )
    return ""


def num_proc_per_worker(pool: WorkerPool, template: Mapping[str, Any]) -> int:
    """Return how many ranks one worker of the pool runs: as declared, else its accelerators, else 1."""
    if pool.num_proc_per_worker is not None:
        return pool.num_proc_per_worker
    return min(max(1, accelerators(pool, template)), MAX_NUM_PROC_PER_WORKER)


def members_per_worker(spec: HeteroTrainJobSpec, pool: WorkerPool, template: Mapping[str, Any]) -> int:
    """Return how many members a worker has; shares and speeds are those of members."""
    return 1 if spec.parallelism.mode is Parallelism.SHARDED else num_proc_per_worker(pool, template)


def selector_keys(job: JobView) -> frozenset[str]:
    """Return the node labels by which a job selects nodes."""
    if not isinstance(job, ValidJob):
        return frozenset()
    found: set[str] = set()
    for pool in job.spec.worker_pools:
        spec = template_of(job, pool).get("spec") or {}
        found |= {*(spec.get("nodeSelector") or {}), *pool.node_selector, *label_keys(required_terms(spec))}
    return frozenset(found)


def build_pod(
    job: ValidJob,
    pool: WorkerPool,
    index: int,
    *,
    plan_version: str,
    avoid: Sequence[str] = (),
    requests: Mapping[str, float] | None = None,
    source: PodSource | None = None,
) -> dict[str, Any]:
    """Return the manifest of a worker's pod.

    Args:
        job: the job.
        pool: the worker's pool.
        index: the worker's number.
        plan_version: version of the newest plan.
        avoid: names of nodes that it must not be placed on.
        requests: its requests as admitted, where that is known.
        source: what it is made from; ``None`` for the job's spec as it is now.
    """
    source = source or PodSource(template=template_of(job, pool))
    template = copy.deepcopy(dict(source.template))
    more = plugins.patch(NewPod(job=job, pool=pool, template=template, requests=requests or {}))
    metadata, spec = template.get("metadata") or {}, template["spec"]
    annotations = metadata.get("annotations") or {}
    name = keys.worker_name(job.key.name, index)
    main = training_container(template)
    ranks = num_proc_per_worker(pool, template)
    _set_pod(spec, pool, name=name, avoid=avoid, scheduler_name=more.scheduler_name)
    settings = source.settings or settings_text(job, grace_s=grace_s_of(spec))
    own = _environment(job, ranks=ranks, settings=settings, main=main)
    own.append({"name": env.SECRET_DIR, "value": env.DEFAULT_PLAN_DIR})
    _set_main(main, spec, job.spec.network, resources=_resources(main, pool), environment=own, ranks=ranks)
    _mount(main, spec, _plan_and_secret(job))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.key.namespace,
            "labels": {**(metadata.get("labels") or {}), **more.labels, **_labels(job, pool, index)},
            "annotations": {
                **{key: value for key, value in annotations.items() if key not in _OWN_ANNOTATIONS},
                **more.annotations,
                DEFAULT_CONTAINER: main["name"],
                RANKS_ANNOTATION: str(ranks),
                keys.ANNOTATION_PLAN: plan_version,
                **source.annotations,
                **({AVOIDS_ANNOTATION: ",".join(avoid)} if avoid else {}),
                **_network_annotations(job.spec.network),
            },
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }


def _labels(job: JobView, pool: WorkerPool, index: int) -> dict[str, str]:
    return {
        **labels_of(job),
        "app.kubernetes.io/component": "worker",
        keys.LABEL_POOL: pool.name,
        keys.LABEL_CAPACITY_TYPE: pool.capacity_type.value,
        keys.LABEL_WORKER_INDEX: str(index),
    }


def _set_pod(spec: dict[str, Any], pool: WorkerPool, *, name: str, avoid: Sequence[str], scheduler_name: str) -> None:
    """Set in a copy of the template what concerns the whole pod."""
    spec["terminationGracePeriodSeconds"] = grace_s_of(spec)
    spec["restartPolicy"] = "Never"
    if scheduler_name and not spec.get("schedulerName"):
        spec["schedulerName"] = scheduler_name
    if spec.get("hostNetwork"):  # by default such a pod asks the node's DNS, which has no Service of the cluster
        spec.setdefault("dnsPolicy", _DNS_ON_HOST)
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("hostname", name)
    spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **pool.node_selector}
    spec["tolerations"] = _tolerations(spec, pool)
    if avoid:
        spec["affinity"] = _avoiding(spec.get("affinity") or {}, avoid)
    # The last words of a script that writes no message: its traceback, or what an init container did not find.
    for container in (*spec["containers"], *(spec.get("initContainers") or ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _set_main(
    main: dict[str, Any],
    spec: Mapping[str, Any],
    network: Network,
    *,
    resources: Mapping[str, Any],
    environment: Sequence[Mapping[str, Any]],
    ranks: int,
) -> None:
    """Set what the training container needs besides its mounts."""
    main["resources"] = resources
    main["env"] = [*environment, *(main.get("env") or [])]
    main["ports"] = [*(main.get("ports") or []), *_ports(network, ranks, spec)]
    main["readinessProbe"] = {
        "httpGet": {"path": keys.READY_PATH, "port": network.metrics_port},
        "periodSeconds": 1,
        # Readiness only admits a worker; a busy device that answers late must not lose it.
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }


def _mount(main: dict[str, Any], spec: dict[str, Any], plan: Mapping[str, Any]) -> None:
    """Mount the plan with the secret, and shared memory where the template has none."""
    mounts = main["volumeMounts"] = [*(main.get("volumeMounts") or [])]
    volumes = spec["volumes"] = [*(spec.get("volumes") or [])]
    volumes.append({"name": keys.CONTAINER_PLAN_VOLUME, **plan})
    mounts.append({"name": keys.CONTAINER_PLAN_VOLUME, "mountPath": env.DEFAULT_PLAN_DIR, "readOnly": True})
    if all(mount.get("mountPath") != _SHM_PATH for mount in mounts):
        volumes.append({"name": keys.CONTAINER_SHM_VOLUME, "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": keys.CONTAINER_SHM_VOLUME, "mountPath": _SHM_PATH})


def _ports(network: Network, ranks: int, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ports of a worker's ranks.

    With the node's network, the scheduler keeps apart pods whose ports it knows, so those of the peers are named, too.
    """
    first = {keys.METRICS_PORT_NAME_PREFIX: network.metrics_port}
    if spec.get("hostNetwork"):
        first[_PEER_PORT_NAME_PREFIX] = network.peer_port
    return [
        {"name": f"{prefix}{rank}", "containerPort": port + rank, "protocol": "TCP"}
        for prefix, port in first.items()
        for rank in range(ranks)
    ]


def _network_annotations(network: Network) -> dict[str, str]:
    """Return what the operator reads from the pod again; nothing for defaults, as in pods of older operators."""
    return {keys.ANNOTATION_PEER_PORT: str(network.peer_port)} if network.peer_port != keys.PEER_PORT else {}


def _port_problem(spec: Mapping[str, Any], main: str, network: Network) -> str:
    """Return which port of another container the workers use themselves; empty when there is none.

    All containers of a pod share its ports. The training container may name the workers' own ones.
    """
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        for port in container.get("ports") or ():
            number = port.get("containerPort")
            if container.get("name") == main or port.get("protocol", "TCP") != "TCP":
                continue
            for field, ports in (("metricsPort", network.metrics_ports), ("peerPort", network.peer_ports)):
                if number in ports:
                    return (
                        f"container {container.get('name')} uses port {number}, and workers use {ports[0]} to "
                        f"{ports[-1]}: give it another port, or change spec.network.{field}"
                    )
    return ""


def _avoiding(affinity: Mapping[str, Any], avoid: Sequence[str]) -> dict[str, Any]:
    """Return an affinity that excludes these nodes as well; a pod has to match one term, so each term gets them.

    The API server allows one value in each expression about a name.
    """
    node = affinity.get("nodeAffinity") or {}
    required = node.get(REQUIRED) or {}
    excluded = [{"key": NODE_NAME, "operator": "NotIn", "values": [name]} for name in avoid]
    own: Sequence[Mapping[str, Any]] = required.get("nodeSelectorTerms") or ({},)
    terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *excluded]} for term in own]
    return {**affinity, "nodeAffinity": {**node, REQUIRED: {**required, "nodeSelectorTerms": terms}}}


def _plan_and_secret(job: ValidJob) -> dict[str, Any]:
    """Return the source of the volume with the plan, and with the job's secret beside it."""
    plan = {"name": keys.plan_name(job.key.name)}
    entry = {"key": keys.SECRET_KEY, "path": keys.SECRET_KEY}
    secret = {"name": keys.secret_name(job.key.name), "items": [entry]}
    return {"projected": {"sources": [{"configMap": plan}, {"secret": secret}]}}


def _tolerations(spec: Mapping[str, Any], pool: WorkerPool) -> list[dict[str, Any]]:
    chosen = [
        *(spec.get("tolerations") or []),
        *(each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in pool.tolerations),
    ]
    named = {each.get("key") for each in chosen}
    silent = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    short = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_TOLERATION_S}
    return [*chosen, *({"key": key, **short} for key in silent if key not in named)]


def _resources(main: Mapping[str, Any], pool: WorkerPool) -> dict[str, Any]:
    own = main.get("resources") or {}
    merged = {
        **own,
        "limits": {**(own.get("limits") or {}), **pool.resources.limits},
        "requests": {**(own.get("requests") or {}), **pool.resources.requests},
    }
    return {name: value for name, value in merged.items() if value}


def _environment(job: ValidJob, *, ranks: int, settings: str, main: Mapping[str, Any]) -> list[dict[str, Any]]:
    fixed = {
        env.JOB_NAME: job.key.name,
        env.JOB_NAMESPACE: job.key.namespace,
        env.JOB_UID: job.uid,
        env.NUM_PROC_PER_WORKER: str(ranks),
        env.PLAN_DIR: env.DEFAULT_PLAN_DIR,
        env.METRICS_PORT: str(job.spec.network.metrics_port),
        env.PEER_PORT: str(job.spec.network.peer_port),
        env.TERMINATION_PATH: str(main.get("terminationMessagePath") or env.DEFAULT_TERMINATION_PATH),
        env.CONFIG: settings,
    }
    if job.spec.runtime is Runtime.TORCHRUN:
        fixed[env.RUNTIME] = Runtime.TORCHRUN
    if prices := {pool.name: pool.price_per_hour for pool in job.spec.worker_pools if pool.price_per_hour}:
        fixed[env.PRICES] = json.dumps(prices, sort_keys=True, separators=(",", ":"))
    from_pod = {env.WORKER: "metadata.name", env.WORKER_UID: "metadata.uid", env.WORKER_ADDRESS: "status.podIP"}
    return [
        *({"name": name, "value": value} for name, value in fixed.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in from_pod.items()),
    ]
