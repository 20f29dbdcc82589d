"""Drafts from manifests of Kubeflow (PyTorchJob, TrainJob), KubeRay (RayJob) and SkyPilot (task).

The formats are public: https://www.kubeflow.org/docs/components/trainer, https://docs.ray.io/en/latest/cluster/kubernetes
and https://docs.skypilot.co/en/latest/reference/yaml-spec.html. What a draft cannot hold becomes a note.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from heterotrain_core.contract import keys
from heterotrain_operator.api.text import quoted

from heterotrain_cli.convert.draft import GPU, Draft, DraftPool, plain_name, split_template, whole
from heterotrain_cli.convert.launching import converted
from heterotrain_cli.errors import InputError

FIXED: Final = "the number of workers is fixed: lower elasticPolicy.minReplicas to let the job go on with fewer"
_TASK: Final = "SkyPilot task"
_TRAINING_JOB: Final = "node"
_TRAINING_CONTAINERS: Final = ("node", "trainer")
_SHARED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")


def draft_of(document: Mapping[str, Any], *, where: str) -> Draft:
    """Return the draft for a manifest.

    Raises:
        InputError: its format is not known, or an essential part is missing.
    """
    kind = format_of(document)
    if document.get("kind") == keys.KIND:
        raise InputError(f"{where}: is a {keys.KIND} already: `heterotrain submit {where}` creates it")
    if not kind:
        named = quoted(str(document.get("kind")))
        raise InputError(f"{where}: kind {named} cannot be converted: known are {', '.join(_BY_KIND)}")
    try:
        return _BY_KIND[kind](document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: not a complete {kind} ({type(error).__name__}: {error}): correct it") from error


def format_of(document: Mapping[str, Any]) -> str:
    """Return the name of a manifest's format; empty for one that cannot be converted."""
    kind = document.get("kind")
    if kind is None and ("run" in document or "resources" in document):
        return _TASK
    return str(kind) if kind in _BY_KIND else ""


def _of(document: Mapping[str, Any]) -> Draft:
    metadata = document.get("metadata") or {}
    name = metadata.get("name") or str(metadata.get("generateName") or "job").rstrip("-")
    return Draft(name=str(name), namespace=metadata.get("namespace"))


def _from_pytorch_job(document: Mapping[str, Any]) -> Draft:
    draft, spec = _of(document), document["spec"]
    roles = {role: part for role, part in spec["pytorchReplicaSpecs"].items() if part}
    processes = str((spec.get("elasticPolicy") or {}).get("nProcPerNode") or spec.get("nprocPerNode") or "")
    parts = []
    for role in sorted(roles, key=lambda role: role != "Master"):
        pod, draft.container, place = split_template(roles[role]["template"], "pytorch")
        parts.append((role, whole(roles[role].get("replicas"), 1), pod, place))
    if len(parts) > 1 and parts[0][3] == parts[1][3]:  # Master and Worker on the same nodes are one pool
        parts = [("workers", parts[0][1] + parts[1][1], parts[1][2], parts[1][3])]
    for role, count, _, place in parts:
        number = int(processes) if processes.isdecimal() and not _gpus(place["resources"]) else None
        draft.pools.append(DraftPool(name=plain_name(role), most=count, processes=number, **place))
    draft.pod = parts[-1][2]
    _take_command(draft)
    elastic = spec.get("elasticPolicy") or {}
    total = sum(pool.most for pool in draft.pools)
    draft.least, draft.most = whole(elastic.get("minReplicas"), total), whole(elastic.get("maxReplicas"), total)
    if elastic:
        last = draft.pools[-1]
        draft.pools[-1] = replace(last, most=max(1, draft.most - total + last.most))
    else:
        draft.notes.append(FIXED)
    policy = spec.get("runPolicy") or {}
    draft.spec |= {name: policy[name] for name in _SHARED if name in policy}
    if policy.get("suspend"):
        draft.spec["suspend"] = True
    return draft


def _from_train_job(document: Mapping[str, Any]) -> Draft:
    draft, spec = _of(document), document["spec"]
    trainer = spec.get("trainer") or {}
    count = whole(trainer.get("numNodes"), 1)
    container = {"name": "trainer"} | {name: trainer[name] for name in ("image", "env") if name in trainer}
    draft.pod = {"containers": [container]}
    draft.command, notes = converted([*(trainer.get("command") or ()), *(trainer.get("args") or ())])
    draft.notes += notes
    place: dict[str, Any] = {"resources": dict(trainer.get("resourcesPerNode") or {})}
    for changed in _changed_pods(spec):
        place["node_selector"] = dict(changed.pop("nodeSelector", None) or place.get("node_selector") or {})
        place["tolerations"] = tuple(changed.pop("tolerations", None) or place.get("tolerations") or ())
        containers = [each for each in changed.pop("containers", []) if each.get("name") in _TRAINING_CONTAINERS]
        for each in containers:
            added = {name: each[name] for name in ("volumeMounts", "env") if each.get(name)}
            container |= {name: [*container.get(name, ()), *values] for name, values in added.items()}
        draft.pod |= {name: value for name, value in changed.items() if name != "initContainers"}
    processes = str(trainer.get("numProcPerNode") or "")
    number = int(processes) if processes.isdecimal() and not _gpus(place["resources"]) else None
    draft.pools.append(DraftPool(name="workers", most=count, processes=number, **place))
    draft.least = draft.most = count
    draft.spec |= {name: spec[name] for name in _SHARED if name in spec}
    runtime = (spec.get("runtimeRef") or {}).get("name", "?")
    draft.notes += [
        FIXED,
        f"what the runtime {runtime} adds (image, volumes, initializers) is not in the TrainJob: add it",
    ]
    if spec.get("suspend"):
        draft.spec["suspend"] = True
    return draft


def _changed_pods(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a TrainJob changes in the pods that train.

    Trainer 2.0 and 2.1 have ``podTemplateOverrides``, and Trainer 2.2 has ``runtimePatches`` in their place. Changes of
    other pods, such as those of initializers, are left out.
    """
    found = [
        dict(each.get("spec") or {})
        for each in spec.get("podTemplateOverrides") or ()
        if _TRAINING_JOB in {target.get("name") for target in each.get("targetJobs") or ({"name": _TRAINING_JOB},)}
    ]
    for patch in spec.get("runtimePatches") or ():
        jobs = _inside(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs") or ()
        found += [
            dict(_inside(each, "template", "spec", "template", "spec"))
            for each in jobs
            if each.get("name") == _TRAINING_JOB
        ]
    return found


def _inside(document: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for name in path:
        document = document.get(name) or {}
    return document


def _from_ray_job(document: Mapping[str, Any]) -> Draft:
    draft, spec = _of(document), document["spec"]
    cluster = spec["rayClusterSpec"]
    groups = cluster.get("workerGroupSpecs") or [{"groupName": "head", "replicas": 1, **cluster["headGroupSpec"]}]
    for group in groups:
        pod, draft.container, place = split_template(group["template"], None)
        count = whole(group.get("maxReplicas"), whole(group.get("replicas"), 1))
        least = min(count, whole(group.get("minReplicas"), 0))
        draft.pools.append(DraftPool(name=plain_name(str(group["groupName"])), most=count, least=least, **place))
        if not draft.pod:
            draft.pod = pod
    draft.command, notes = converted(shlex.split(str(spec.get("entrypoint") or "")))
    draft.notes += notes
    draft.notes.append(
        "Ray does not run in the job: the script has to hold the training function itself, without ray.init and "
        "TorchTrainer (docs/other-libraries.md)"
    )
    if len(groups) > 1:
        draft.notes.append(f"all workers use the template of group {groups[0]['groupName']}: compare the others")
    if spec.get("runtimeEnvYAML"):
        draft.notes.append("runtimeEnvYAML is left out: put its packages and variables into the image")
    draft.least = max(1, sum(pool.least for pool in draft.pools))
    draft.most = sum(pool.most for pool in draft.pools)
    draft.spec |= {name: spec[name] for name in _SHARED if name in spec}
    if spec.get("suspend"):
        draft.spec["suspend"] = True
    return draft


def _from_skypilot(task: Mapping[str, Any]) -> Draft:
    draft = Draft(name=str(task.get("name") or "task"))
    resources = task.get("resources") or {}
    choices = resources.get("any_of") or resources.get("ordered") or [{}]
    count = whole(task.get("num_nodes"), 1)
    for choice in choices:
        draft.pools += _skypilot_pools({**resources, **choice}, count)
    if len(draft.pools) > 1:
        draft.notes.append("SkyPilot takes one of several accelerators; the job may use all pools together")
    image = str(resources.get("image_id") or "").removeprefix("docker:")
    variables = {**(task.get("envs") or {})}
    container: dict[str, Any] = {"name": "trainer"} | ({"image": image} if image else {})
    if variables:
        container["env"] = [{"name": str(k), "value": "" if v is None else str(v)} for k, v in variables.items()]
    draft.pod = {"containers": [container]}
    draft.command, notes = converted(["bash", "-c", str(task.get("run") or "")])
    draft.notes += notes
    for part, what in (("setup", "build it into the image"), ("workdir", "put the files into the image"),
                       ("file_mounts", "mount volumes in template, or read from the store")):  # fmt: skip
        if task.get(part):
            draft.notes.append(f"{part} is left out: {what}")
    if task.get("secrets"):
        draft.notes.append("secrets are left out: add them as env with valueFrom.secretKeyRef")
    draft.notes.append("pools select nodes by the label heterotrain.dev/pool: replace it by the labels of your nodes")
    draft.least, draft.most = count, sum(pool.most for pool in draft.pools)
    return draft


def _skypilot_pools(resources: Mapping[str, Any], count: int) -> list[DraftPool]:
    found = resources.get("accelerators") or {}
    named = dict.fromkeys(found, 1) if isinstance(found, list) else found
    if isinstance(named, str):
        named = {named: 1}
    pools = []
    for text, number in (named or {"cpu": 0}).items():
        name, _, amount = str(text).partition(":")
        gpus = whole(amount, number if isinstance(number, int) else 1) if name != "cpu" else 0
        limits: dict[str, Any] = {GPU: gpus} if gpus else {}
        requests = {
            kind: str(resources[key]).rstrip("+x") + unit
            for key, kind, unit in (("cpus", "cpu", ""), ("memory", "memory", "Gi"))
            if resources.get(key)
        }
        parts = {"limits": limits, "requests": requests}
        pools.append(
            DraftPool(
                name=plain_name(name),
                most=count,
                spot=bool(resources.get("use_spot")),
                resources={key: value for key, value in parts.items() if value},
                node_selector={"heterotrain.dev/pool": plain_name(name)},
            )
        )
    return pools


def _take_command(draft: Draft) -> None:
    main = next(each for each in draft.pod["containers"] if each.get("name") == draft.container)
    draft.command, notes = converted([*(main.get("command") or ()), *(main.get("args") or ())])
    draft.notes += notes


def _gpus(resources: Mapping[str, Any]) -> bool:
    return any("/" in name for part in resources.values() if isinstance(part, Mapping) for name in part)


_BY_KIND: Final[Mapping[str, Callable[[Mapping[str, Any]], Draft]]] = {
    "PyTorchJob": _from_pytorch_job, "TrainJob": _from_train_job, "RayJob": _from_ray_job, _TASK: _from_skypilot,
}  # fmt: skip
