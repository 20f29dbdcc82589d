"""Drafts from jobs of Kubeflow: PyTorchJob, MPIJob and TrainJob.

The formats are public: https://www.kubeflow.org/docs/components/trainer and its legacy versions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from heterotrain_cli.convert.draft import (
    CONTAINER,
    Draft,
    DraftPool,
    PoolPod,
    complete_resources,
    plain_name,
    processes_of,
    taken_metadata,
    taken_place,
    taken_pod,
    whole,
)
from heterotrain_cli.convert.rest import Rest

NO_MPI: Final = (
    "MPI does not run in the job: ranks find each other by RANK, WORLD_SIZE and MASTER_ADDR. A script with Horovod has "
    "to be changed (docs/other-libraries.md); DeepSpeed reads these variables"
)
_NODE: Final = "node"
_TRAINING_CONTAINERS: Final = ("node", "trainer")
_FOLDERS: Final = {"dataset": "/workspace/dataset", "model": "/workspace/model"}
SHARED: Final = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
FIXED: Final = "the number of workers is fixed: lower elasticPolicy.minReplicas to let the job go on with fewer"
_SCHEDULERS: Final = {
    "volcano": "Volcano", "scheduler-plugins-scheduler": "Coscheduling", "kai-scheduler": "KAI",
}  # fmt: skip


def from_pytorch_job(document: Rest) -> Draft:
    """Return the draft of a PyTorchJob."""
    draft, spec = taken_metadata(document), document.part("spec")
    roles, elastic, policy = spec.part("pytorchReplicaSpecs"), spec.part("elasticPolicy"), spec.part("runPolicy")
    is_elastic = bool(list(elastic))
    processes = elastic.take("nProcPerNode", spec.take("nprocPerNode"))
    parts: list[tuple[str, int, PoolPod]] = []
    for role in sorted(roles, key=lambda role: role != "Master"):
        if not roles.peek(role):
            continue
        part = roles.part(role)
        part.take_one_of("restartPolicy", "OnFailure", "Always")
        parts.append((role, whole(part.take("replicas"), 1), taken_pod(part.part("template"), "pytorch", draft.notes)))
    if not parts:
        raise KeyError("pytorchReplicaSpecs")
    if len(parts) > 1 and parts[0][2] == parts[1][2]:  # Master and Worker are alike
        parts = [("workers", parts[0][1] + parts[1][1], parts[1][2])]
    for role, count, pod in parts:
        launch = draft.launch(pod)
        number = processes_of(launch.processes or processes, pod.place["resources"])
        draft.pools.append(DraftPool(name=plain_name(role), most=count, processes=number, pod=pod, **pod.place))
    total = sum(pool.most for pool in draft.pools)
    draft.least, draft.most = whole(elastic.take("minReplicas"), total), whole(elastic.take("maxReplicas"), total)
    if is_elastic:
        last = draft.pools[-1]
        draft.pools[-1] = replace(last, most=max(1, draft.most - total + last.most))
        if "maxRestarts" in elastic:
            draft.spec["backoffLimit"] = elastic.take("maxRestarts")
    else:
        draft.notes.append(FIXED)
    take_run_policy(policy, draft)
    return draft


def from_mpi_job(document: Rest) -> Draft:
    """Return the draft of an MPIJob: its workers, with the command of its launcher."""
    draft, spec = taken_metadata(document), document.part("spec")
    roles, policy = spec.part("mpiReplicaSpecs"), spec.part("runPolicy")
    launcher, worker = roles.part("Launcher"), roles.part("Worker")
    for role in (launcher, worker):
        role.take_one_of("restartPolicy", "OnFailure", "Always", "Never")
    launcher.take_one_of("replicas", 1)
    count = whole(worker.take("replicas"), 1)
    first = taken_pod(launcher.part("template"), None, draft.notes)
    pod = taken_pod(worker.part("template"), None, draft.notes)
    if pod.words:
        draft.notes.append(f"left out: the workers' own command {' '.join(map(str, pod.words))[:100]}")
    add_from_leader(pod, first, draft, "the launcher")
    launch = draft.launch(pod, first.words)
    processes = processes_of(spec.take("slotsPerWorker"), pod.place["resources"])
    launch.processes = None  # of mpirun, it is that of all workers
    draft.pools.append(DraftPool(name="workers", most=count, processes=processes, pod=pod, **pod.place))
    draft.least = draft.most = count
    draft.notes += [FIXED, NO_MPI]
    take_run_policy(policy, draft)
    take_run_policy(spec, draft)  # where the first versions have the same fields
    spec.drop("sshAuthMountPath", "mpiImplementation", "launcherCreationPolicy", "runLauncherAsWorker")
    return draft


def add_from_leader(pod: PoolPod, leader: PoolPod, draft: Draft, who: str) -> None:
    """Give workers what the pod has in which the command starts elsewhere: variables, volumes and their mounts."""
    main, theirs = pod.main, leader.main
    for field, key, mine, other in (
        ("env", "name", main, theirs),
        ("volumeMounts", "mountPath", main, theirs),
        ("volumes", "name", pod.spec, leader.spec),
        ("envFrom", None, main, theirs),
    ):
        has = list(mine.get(field) or ())
        known = [each.get(key) for each in has] if key else has
        added = [each for each in other.pop(field, None) or () if (each.get(key) if key else each) not in known]
        if added:
            mine[field] = [*has, *added]
    if theirs.get("workingDir"):
        main.setdefault("workingDir", theirs["workingDir"])
    rest = Rest({**leader.spec, "containers": leader.spec["containers"][1:]}, who)
    rest_of_main = {name: value for name, value in theirs.items() if name not in ("name", "workingDir")}
    if rest_of_main.get("image") == main.get("image"):
        rest_of_main.pop("image", None)
    placed = {"nodeSelector": leader.place["node_selector"], "tolerations": list(leader.place["tolerations"])}
    for left in (
        rest,
        Rest({**rest_of_main, "resources": leader.place["resources"]}, f"{who}.container"),
        Rest({**placed, "labels": leader.labels, "annotations": leader.annotations}, who),
    ):
        draft.notes += [f"left out: {line}" for line in left.left()]


def from_train_job(document: Rest) -> Draft:
    """Return the draft of a TrainJob."""
    draft, spec = taken_metadata(document), document.part("spec")
    trainer = spec.part("trainer")
    count = whole(trainer.take("numNodes"), 1)
    main = {"name": CONTAINER} | {name: trainer.take(name) for name in ("image", "env") if name in trainer}
    pod = PoolPod(spec={"containers": [main]})
    words = [*trainer.take("command", ()), *trainer.take("args", ())]
    resources = trainer.part("resourcesPerNode")
    own = {name: resources.object(name) for name in ("limits", "requests") if name in resources}
    pod.place = {"resources": complete_resources(own)}
    if claims := {name: resources.take(name) for name in resources}:
        main["resources"] = claims
    draft.labels |= spec.object("labels")
    draft.annotations |= spec.object("annotations")
    for changed in _changes(spec, draft):
        apply_change(pod, changed, draft)
    launch = draft.launch(pod, words)
    number = processes_of(launch.processes or trainer.take("numProcPerNode"), pod.place["resources"])
    trainer.drop("numProcPerNode")
    draft.pools.append(DraftPool(name="workers", most=count, processes=number, pod=pod, **pod.place))
    draft.least = draft.most = count
    take_lifetime(spec, draft)
    _add_initializers(spec.part("initializer"), pod, draft)
    spec.take_one_of("managedBy", "trainer.kubeflow.org/trainjob-controller")
    runtime = spec.part("runtimeRef")
    runtime.drop("kind", "apiGroup")
    draft.notes += [
        FIXED, f"what the runtime {runtime.take('name', '?')} adds (image, volumes) is not in the TrainJob: add it",
    ]  # fmt: skip
    return draft


def _changes(spec: Rest, draft: Draft) -> list[Rest]:
    """Return what a TrainJob changes in the pods that train, as pod templates; other changes stay.

    Trainer 2.0 and 2.1 have ``podTemplateOverrides``, and Trainer 2.2 has ``runtimePatches`` in their place.
    """
    found = []
    for each in spec.items("podTemplateOverrides"):
        targets = each.items("targetJobs")
        names = {target.peek_text("name") for target in targets}
        if not targets or _NODE in names:
            for target in targets:
                target.take_one_of("name", _NODE)
            found.append(each)
    for patch in spec.items("runtimePatches"):
        patch.drop("manager", "time")
        runtime = patch.part("trainingRuntimeSpec").part("template")
        _take_labels(runtime.part("metadata"), draft)
        for job in runtime.part("spec").items("replicatedJobs", "name"):
            if job.peek_text("name") != _NODE:
                continue
            job.drop("name")
            inner = job.part("template")
            _take_labels(inner.part("metadata"), draft)
            found.append(inner.part("spec").part("template"))
    return found


def _take_labels(metadata: Rest, draft: Draft) -> None:
    draft.labels |= metadata.object("labels")
    draft.annotations |= metadata.object("annotations")


def apply_change(pod: PoolPod, template: Rest, draft: Draft) -> None:
    """Change the pods as a TrainJob asks for."""
    has_containers = "containers" in template.peek("spec")
    changed = taken_pod(template, None, draft.notes) if has_containers else None
    if changed is None:
        spec = template.part("spec")
        template_metadata = template.part("metadata")
        place = taken_place(spec)
        changed = PoolPod(
            spec={**{name: spec.take(name) for name in spec}, "containers": []},
            labels=template_metadata.object("labels"), annotations=template_metadata.object("annotations"), place=place,
        )  # fmt: skip
    containers = changed.spec.pop("containers")
    for each in containers:
        if each.get("name") not in (None, *_TRAINING_CONTAINERS):
            pod.spec["containers"].append(each)
            continue
        for name, value in each.items():
            if name in ("env", "envFrom", "volumeMounts"):
                pod.main[name] = [*(pod.main.get(name) or ()), *value]
            elif name != "name":
                pod.main[name] = value
    if changed.words:
        draft.notes.append(f"left out: the patched command {' '.join(map(str, changed.words))[:100]}")
    for name in ("node_selector", "tolerations"):
        pod.place[name] = changed.place.get(name) or pod.place.get(name) or ({} if name == "node_selector" else ())
    if changed.place.get("resources"):
        pod.place["resources"] = {**pod.place["resources"], **changed.place["resources"]}
    pod.labels |= changed.labels
    pod.annotations |= changed.annotations
    pod.spec |= changed.spec


def _add_initializers(initializer: Rest, pod: PoolPod, draft: Draft) -> None:
    """Let each worker fetch data set and model before it trains, as the initializers of the TrainJob do once."""
    for kind, folder in _FOLDERS.items():
        if kind not in initializer:
            continue
        part = initializer.part(kind)
        container: dict[str, Any] = {"name": f"{kind}-initializer", "image": f"FILL-IN/{kind.upper()}-INITIALIZER"}
        container["env"] = [{"name": "STORAGE_URI", "value": part.take("storageUri", "")}, *part.take("env", ())]
        if (secret := part.part("secretRef").take("name")) is not None:
            container["envFrom"] = [{"secretRef": {"name": secret}}]
        mount = {"name": "initializer", "mountPath": "/workspace"}
        container["volumeMounts"] = [mount]
        pod.spec["initContainers"] = [*pod.spec.get("initContainers", ()), container]
        if mount not in pod.main.get("volumeMounts", ()):
            pod.main["volumeMounts"] = [*pod.main.get("volumeMounts", ()), mount]
            pod.spec["volumes"] = [*pod.spec.get("volumes", ()), {"name": "initializer", "emptyDir": {}}]
        draft.notes.append(
            f"every worker fetches the {kind} to {folder}: replace {container['image']} by the image of your Trainer's "
            f"{kind} initializer"
        )


def take_lifetime(policy: Rest, draft: Draft) -> None:
    """Take over how long the job may run and is kept, and whether it is suspended."""
    for name in SHARED:
        if name in policy:
            draft.spec[name] = policy.take(name)
    if policy.take("suspend"):
        draft.spec["suspend"] = True


def take_run_policy(policy: Rest, draft: Draft) -> None:
    """Take over a ``runPolicy``. The pools have to be there: groups and priorities are those of their pods."""
    take_lifetime(policy, draft)
    clean = policy.take("cleanPodPolicy")
    if clean in ("None", "Running", "All"):
        draft.spec["cleanPodPolicy"] = clean
    policy.take_one_of("managedBy", "kubeflow.org/training-operator", "kubeflow.org/mpi-operator")
    if "schedulingPolicy" not in policy:
        return
    scheduling = policy.part("schedulingPolicy")
    if (priority := scheduling.take("priorityClass")) is not None:
        for pool in draft.pools:
            pool.pod.spec.setdefault("priorityClassName", priority)
    scheduling.take_one_of("minAvailable", draft.least, draft.most)
    chosen = {str(pool.pod.spec.get("schedulerName") or "volcano") for pool in draft.pools}
    scheduler = _SCHEDULERS.get(next(iter(chosen))) if len(chosen) == 1 else None
    if scheduler is None or (scheduler == "KAI" and "queue" not in scheduling):
        return
    draft.spec["podGroup"] = {"scheduler": scheduler}
    if scheduler != "Coscheduling" and (queue := scheduling.take("queue")) is not None:
        draft.spec["podGroup"]["queue"] = queue
