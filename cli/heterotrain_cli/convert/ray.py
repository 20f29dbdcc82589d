"""Drafts from KubeRay's RayJob: https://docs.ray.io/en/latest/cluster/kubernetes."""

from __future__ import annotations

import copy

from heterotrain_cli.convert.draft import (
    Draft,
    DraftPool,
    PoolPod,
    plain_name,
    processes_of,
    taken_metadata,
    taken_pod,
    whole,
)
from heterotrain_cli.convert.kubeflow import add_from_leader, take_lifetime
from heterotrain_cli.convert.rest import Rest


def from_ray_job(document: Rest) -> Draft:
    """Return the draft of a RayJob: its groups of workers, with what the head has for the entry point."""
    draft, spec = taken_metadata(document), document.part("spec")
    cluster = spec.part("rayClusterSpec")
    cluster.drop("rayVersion")
    head = cluster.part("headGroupSpec")
    head.drop("rayStartParams", "serviceType")
    groups = cluster.items("workerGroupSpecs", "groupName")
    entry = ["sh", "-c", str(spec.take("entrypoint", ""))]
    if not groups and "template" not in head:
        raise KeyError("workerGroupSpecs")
    leader = taken_pod(head.part("template"), None, draft.notes)
    parts = [_group(each, draft) for each in groups]
    for _, _, _, pod in parts:
        add_from_leader(pod, copy.deepcopy(leader), draft, "the head")
    for name, count, least, pod in parts or [("head", 1, 0, leader)]:
        if pod.main.get("lifecycle"):
            draft.notes.append(f"left out: lifecycle of {name}: {str(pod.main.pop('lifecycle'))[:80]}")
        pod.words = []
        launch = draft.launch(pod, entry)
        number = processes_of(launch.processes, pod.place["resources"])
        draft.pools.append(
            DraftPool(name=plain_name(name), most=count, least=least, processes=number, pod=pod, **pod.place)
        )
    draft.notes.append(
        "Ray does not run in the job: the script has to hold the training function itself, without ray.init and "
        "TorchTrainer (docs/other-libraries.md)"
    )
    if spec.take("runtimeEnvYAML"):
        draft.notes.append("runtimeEnvYAML is left out: put its packages and variables into the image")
    draft.least = max(1, sum(pool.least for pool in draft.pools))
    draft.most = sum(pool.most for pool in draft.pools)
    take_lifetime(spec, draft)
    spec.drop("shutdownAfterJobFinishes")  # the nodes of an ended job are free
    return draft


def _group(group: Rest, draft: Draft) -> tuple[str, int, int, PoolPod]:
    """Return name, most and fewest workers, and pods of a group."""
    name = str(group.take("groupName", "workers"))
    group.drop("rayStartParams")
    pod = taken_pod(group.part("template"), None, draft.notes)
    count = whole(group.take("maxReplicas"), whole(group.take("replicas"), 1))
    group.drop("replicas")
    return name, count, min(count, whole(group.take("minReplicas"), 0)), pod
