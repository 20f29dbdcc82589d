"""A job that is being written: pools with their pods, and what the user still has to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Runtime
from heterotrain_operator.decide.objects.pool_template import MERGE_KEYS

from heterotrain_cli.convert.launching import Launch, converted
from heterotrain_cli.convert.rest import Rest

GPU: Final = "nvidia.com/gpu"
CONTAINER: Final = "trainer"
_SET_BY_LAUNCHER: Final = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
)
_NOT_FOR_JOBS: Final = ("nodeName", "activeDeadlineSeconds", "hostname", "subdomain")
_TOLERATION: Final = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
_NAME_LENGTH: Final = 48
_QUEUE: Final = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class")
_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
_OF_SOURCE: Final = ("creationTimestamp", "uid", "resourceVersion", "generation", "managedFields", "selfLink")
_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_ORDERED = ("initContainers",)
"""Lists whose order counts: they are common as a whole or not at all."""
_WHOLE = ("env", "hostAliases", "imagePullSecrets", "resourceClaims", "volumeMounts", "volumes")
"""Lists of which an item is common as a whole or not at all."""


@dataclass(slots=True, kw_only=True)
class PoolPod:
    """The pods of one pool: template without its place, and what starts there.

    Attributes:
        spec: of the pod; its training container is the first one, without command and resources.
        labels, annotations: of the pod.
        place: ``resources``, ``node_selector`` and ``tolerations`` for a ``DraftPool``.
        words: the command of the training container, as it is given.
    """

    spec: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    @property
    def main(self) -> dict[str, Any]:
        """The training container."""
        found: dict[str, Any] = self.spec["containers"][0]
        return found

    def start(self, launch: Launch) -> None:
        """Let the training container start this."""
        self.main["command"] = launch.command
        if launch.folder:
            self.main["workingDir"] = launch.folder
        for name, value in launch.variables.items():
            variables = [each for each in self.main.get("env") or () if each.get("name") != name]
            self.main["env"] = [*variables, {"name": name, "value": value}]

    def template(self) -> dict[str, Any]:
        """Return the pod template."""
        metadata = {"labels": self.labels, "annotations": self.annotations}
        given = {name: value for name, value in metadata.items() if value}
        return {**({"metadata": given} if given else {}), "spec": self.spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPool:
    """One pool: its workers, which nodes they take, and their pods."""

    name: str
    most: int
    least: int = 0
    spot: bool = False
    resources: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    processes: int | None = None
    pod: PoolPod

    def body(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pool as an entry of ``spec.workerPools``."""
        optional = {
            "minReplicas": self.least or None,
            "capacityType": "Spot" if self.spot else None,
            "nodeSelector": dict(self.node_selector) or None,
            "tolerations": [dict(each) for each in self.tolerations] or None,
            "resources": dict(self.resources) or None,
            "numProcPerWorker": self.processes,
            "template": dict(patch) or None,
        }
        return {"name": self.name, "maxReplicas": self.most} | {k: v for k, v in optional.items() if v is not None}


@dataclass(slots=True, kw_only=True)
class Draft:
    """A job in parts.

    Attributes:
        name, namespace, labels, annotations: of the object.
        pools: in order of preference.
        least, most: workers over all pools.
        spec: further fields of ``spec``.
        notes: what could not be taken over, each with what to do.
    """

    name: str
    namespace: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    pools: list[DraftPool] = field(default_factory=list)
    least: int | None = None
    most: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def body(self, *, batch: int | None, epochs: int | None, steps: int | None = None) -> dict[str, Any]:
        """Return the job: for an unchanged script, or with a batch for a script that uses heterotrain."""
        metadata: dict[str, Any] = {"name": plain_name(self.name)}
        own = {"namespace": self.namespace, "labels": self.labels, "annotations": self.annotations}
        metadata |= {name: value for name, value in own.items() if value}
        elastic = {"minReplicas": self.least, "maxReplicas": self.most}
        spec: dict[str, Any] = {} if batch is not None else {"runtime": Runtime.TORCHRUN.value}
        if batch is not None:
            length = {"epochs": epochs, "steps": steps}
            given = {name: count for name, count in length.items() if count is not None}
            spec["training"] = {"globalBatchSize": batch, **given}
        spec |= {"elasticPolicy": {key: value for key, value in elastic.items() if value is not None}}
        templates = self._templates()
        base = common(templates)
        spec["workerPools"] = [
            pool.body(differences(base, each)) for pool, each in zip(self.pools, templates, strict=True)
        ]
        spec |= {**self.spec, "template": base}
        return {
            "apiVersion": f"{keys.GROUP}/{keys.VERSION}", "kind": keys.KIND, "metadata": metadata, "spec": spec,
        }  # fmt: skip

    def _templates(self) -> list[dict[str, Any]]:
        """Return the template of each pool; the training container has one name in all."""
        name = self.pools[0].pod.main.get("name") or CONTAINER
        templates = []
        for pool in self.pools:
            pool.pod.main["name"] = name
            if not pool.pod.main.get("image"):
                pool.pod.main["image"] = "FILL-IN/IMAGE"
                if (note := "the image is not named there: replace FILL-IN/IMAGE") not in self.notes:
                    self.notes.append(note)
            templates.append(pool.pod.template())
        return templates

    def launch(self, pod: PoolPod, words: Sequence[str] | None = None) -> Launch:
        """Let a pool's pods start a command, their own by default; note once what is left to do."""
        known = [str(each.get("name")) for each in pod.main.get("env") or ()]
        launch = converted(pod.words if words is None else words, known)
        self.notes += [note for note in launch.notes if note not in self.notes]
        if launch.restarts is not None:
            self.spec.setdefault("backoffLimit", launch.restarts)
        pod.start(launch)
        return launch

    def join_queue(self) -> None:
        """Give the pods the labels of a queue of Kueue, which admits pods and does not know this kind of job."""
        found: dict[str, str] = {}
        for name in _QUEUE:
            if name in self.labels:
                found[name] = self.labels.pop(name)
        if not found:
            return
        size = sum(pool.most for pool in self.pools)
        if self.least == self.most == size:
            found[_GROUP] = plain_name(self.name)
        for pool in self.pools:
            pool.pod.labels |= found
        if self.spec.pop("suspend", None):
            self.notes.append("left out: suspend: true, because Kueue holds the pods by gates until it admits them")


def taken_metadata(document: Rest) -> Draft:
    """Return a draft with name, labels and annotations of a Kubernetes object."""
    document.drop("apiVersion", "kind", "status")
    metadata = document.part("metadata")
    metadata.drop(*_OF_SOURCE)
    prefix = str(metadata.take("generateName", "job")).rstrip("-")
    annotations = metadata.object("annotations")
    annotations.pop(_APPLIED, None)
    return Draft(
        name=str(metadata.take("name", prefix)),
        namespace=metadata.take("namespace"),
        labels=metadata.object("labels"),
        annotations=annotations,
    )


def taken_pod(template: Rest, container: str | None, notes: list[str]) -> PoolPod:
    """Return the pods of a pod template; what a job's pods cannot have is noted."""
    metadata, spec = template.part("metadata"), template.part("spec")
    metadata.drop("creationTimestamp", "name", "namespace")
    labels, annotations = metadata.object("labels"), metadata.object("annotations")
    spec.drop("restartPolicy")  # the operator replaces workers
    containers = [dict(each) for each in spec.take("containers", [])] or [{}]
    names = [each.get("name") for each in containers]
    main = containers.pop(names.index(container) if container in names else 0)
    notes += [
        f"left out: {name} of the pods, which the operator or the pools set" for name in _NOT_FOR_JOBS if name in spec
    ]
    spec.drop(*_NOT_FOR_JOBS)
    if probe := main.pop("readinessProbe", None):
        notes += [
            f"left out, because the operator has its own: {line}" for line in Rest(probe, "readinessProbe").left()
        ]
    words = [*(main.pop("command", None) or ()), *(main.pop("args", None) or ())]
    resources = dict(main.pop("resources", None) or {})
    own = {name: resources.pop(name) for name in ("limits", "requests") if name in resources}
    if resources:  # such as claims, which are those of a container
        main["resources"] = resources
    place = {"resources": complete_resources(own), **taken_place(spec)}
    if "env" in main:
        variables = main["env"] or ()
        main["env"] = [each for each in variables if each.get("name") not in _SET_BY_LAUNCHER]
        notes += [
            f"left out: the variable {each['name']}, which heterotrain-run sets"
            for each in variables
            if each.get("name") in _SET_BY_LAUNCHER
        ]
    pod = {name: spec.take(name) for name in spec}
    whole_pod = {**pod, "containers": [main, *containers]}
    return PoolPod(spec=whole_pod, labels=labels, annotations=annotations, place=place, words=words)


def taken_place(spec: Rest) -> dict[str, Any]:
    """Return selector and tolerations for a pool; tolerations with fields that a pool's have not stay."""
    tolerations = list(spec.take("tolerations", ()))
    known = [each for each in tolerations if set(each) <= _TOLERATION]
    if others := [each for each in tolerations if each not in known]:
        spec.put("tolerations", others)
    return {"node_selector": spec.object("nodeSelector"), "tolerations": tuple(known)}


def complete_resources(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources with limits for devices that are only requested: the API server demands both."""
    found = copy.deepcopy(dict(resources))
    devices = {name: count for name, count in (found.get("requests") or {}).items() if "/" in name}
    if devices:
        found["limits"] = {**devices, **(found.get("limits") or {})}
    return found


def processes_of(given: object, resources: Mapping[str, Any]) -> int | None:
    """Return ``numProcPerWorker``; ``None`` where the accelerators give it, or nothing does."""
    text = str(given or "")
    devices = [
        str(count)
        for name, count in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items()
        if "/" in name
    ]
    if not text.isdecimal() or int(text) < 1 or (devices and devices == [text]):
        return None
    return int(text) if devices or int(text) > 1 else None


def plain_name(text: str) -> str:
    """Return a name for a job or a pool that the API server takes."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].rstrip("-")
    return found if found and found[0].isalpha() else f"job-{found}".rstrip("-")


def whole(value: Any, default: int) -> int:
    """Return a count of a manifest, or the default where it is not a positive number."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else default


def common(templates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is the same in all of these objects."""
    first, found = templates[0], {}
    for name, value in first.items():
        others = [each.get(name) for each in templates]
        if all(other == value for other in others):
            found[name] = value
        elif all(isinstance(other, Mapping) for other in others):
            found[name] = common([other for other in others if isinstance(other, Mapping)])
        elif name in MERGE_KEYS and name not in _ORDERED and all(isinstance(other, list) for other in others):
            found[name] = _common_items([other for other in others if isinstance(other, list)], name)
    return found


def differences(base: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that makes the template of what all have in common: the inverse of the operator's merge."""
    found: dict[str, Any] = {}
    for name, value in template.items():
        before = base.get(name)
        if before == value:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            found[name] = differences(before, value)
        elif name in MERGE_KEYS and isinstance(value, list) and isinstance(before, list):
            key = MERGE_KEYS[name]
            known = {each[key]: each for each in before}
            found[name] = [
                each if each[key] not in known else {key: each[key], **differences(known[each[key]], each)}
                for each in value
                if known.get(each[key]) != each
            ]
        else:
            found[name] = value
    return found


def _common_items(lists: Sequence[list[Any]], name: str) -> list[Any]:
    key = MERGE_KEYS[name]
    by_key = [{each[key]: each for each in items} for items in lists]
    shared = [each[key] for each in lists[0] if all(each[key] in items for items in by_key)]
    found = []
    for value in shared:
        same = [items[value] for items in by_key]
        if name in _WHOLE and any(each != same[0] for each in same):
            continue
        found.append({key: value, **common(same)})
    return found
