"""Drafts from SkyPilot's tasks: https://docs.skypilot.co/en/latest/reference/yaml-spec.html."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from heterotrain_cli.convert.draft import CONTAINER, GPU, Draft, DraftPool, PoolPod, plain_name, processes_of, whole
from heterotrain_cli.convert.kubeflow import apply_change
from heterotrain_cli.convert.rest import Rest

_RESOURCES: Final = (
    (re.compile(r"^(mi\d|radeon|instinct)", re.IGNORECASE), "amd.com/gpu"),
    (re.compile(r"^tpu", re.IGNORECASE), "google.com/tpu"),
    (re.compile(r"^gaudi", re.IGNORECASE), "habana.ai/gaudi"),
    (re.compile(r"^(trainium|inferentia)", re.IGNORECASE), "aws.amazon.com/neuron"),
)
"""Resources of accelerators by their names; any other name is a GPU of NVIDIA."""
_USABLE: Final = (GPU, "amd.com/gpu")
_LEFT_OUT: Final = (
    ("setup", "build it into the image"),
    ("workdir", "put the files into the image"),
    ("file_mounts", "mount volumes in template, or read from the store"),
    ("volumes", "name their claims in template"),
    ("secrets", "add them as env with valueFrom.secretKeyRef"),
)


def from_skypilot(task: Rest) -> Draft:
    """Return the draft of a task."""
    draft = Draft(name=str(task.take("name", "task")))
    resources = task.part("resources")
    choices = resources.items("any_of") or resources.items("ordered") or [Rest({})]
    count = whole(task.take("num_nodes"), 1)
    variables = [{"name": str(k), "value": "" if v is None else str(v)} for k, v in task.object("envs").items()]
    pod_config = task.part("config").part("kubernetes").part("pod_config")
    command = ["bash", "-c", str(task.take("run", ""))]
    image, spot = resources.take("image_id"), resources.take("use_spot")
    shared = {name: resources.take(name) for name in ("accelerators", "cpus", "memory") if name in resources}
    changes = {name: pod_config.take(name) for name in pod_config}
    for choice in choices:
        own = choice
        for name, value in shared.items():
            if name not in own:
                own.put(name, value)
        chosen = str(own.take("image_id", image or "")).removeprefix("docker:")
        is_spot = bool(own.take("use_spot", spot))
        for name, limits, requests in _accelerators(own, draft):
            main = {"name": CONTAINER} | ({"image": chosen} if chosen else {})
            pod = PoolPod(spec={"containers": [main | ({"env": [*variables]} if variables else {})]})
            place = {"limits": limits, "requests": requests}
            pod.place = {"resources": {key: value for key, value in place.items() if value}}
            if changes:
                change = Rest(changes, "config.kubernetes.pod_config")
                apply_change(pod, change, draft)
                draft.notes += [f"left out: {line}" for line in change.left()]
            launch = draft.launch(pod, command)
            selector = {"heterotrain.dev/pool": plain_name(name), **(pod.place.pop("node_selector", None) or {})}
            draft.pools.append(
                DraftPool(
                    name=plain_name(name), most=count, spot=is_spot, node_selector=selector, pod=pod,
                    processes=processes_of(launch.processes, pod.place["resources"]), **pod.place,
                )
            )  # fmt: skip
    if len(draft.pools) > 1:
        draft.notes.append("SkyPilot takes one of several accelerators; the job may use all pools together")
    for part, what in _LEFT_OUT:
        if value := task.take(part):
            draft.notes += [
                f"{part} is left out: {what}",
                *(f"left out: {line}" for line in Rest({part: value}).left()),
            ]
    draft.notes.append("pools select nodes by the label heterotrain.dev/pool: replace it by the labels of your nodes")
    draft.least, draft.most = count, sum(pool.most for pool in draft.pools)
    return draft


def _accelerators(resources: Rest, draft: Draft) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return name, limits and requests of each choice of accelerators."""
    found = resources.take("accelerators", {})
    named: Mapping[str, Any] = dict.fromkeys(found, 1) if isinstance(found, list) else found
    if isinstance(named, str):
        named = {named: 1}
    requests = _requests(resources)
    pools = []
    for text, number in (named or {"cpu": 0}).items():
        name, _, amount = str(text).partition(":")
        count = whole(amount, number if isinstance(number, int) else 1) if name != "cpu" else 0
        resource = next((resource for pattern, resource in _RESOURCES if pattern.match(name)), GPU)
        if resource not in _USABLE:
            draft.notes.append(f"{name} ({resource}): training runs on GPUs of NVIDIA and AMD and on CPUs only")
        pools.append((name, {resource: count} if count else {}, requests))
    return pools


def _requests(resources: Rest) -> dict[str, str]:
    """Return processors and memory; ``4x`` of memory is that many GiB for each processor."""
    cpus = str(resources.take("cpus", "")).rstrip("+")
    memory = str(resources.take("memory", "")).rstrip("+")
    if memory.endswith("x"):
        factor = memory.removesuffix("x")
        known = cpus.isdecimal() and factor.replace(".", "", 1).isdecimal()
        memory = f"{float(factor) * int(cpus):g}" if known else ""
    unit = "" if memory and not memory[-1].isdecimal() else "Gi"
    return {name: value for name, value in (("cpu", cpus), ("memory", f"{memory}{unit}" if memory else "")) if value}
