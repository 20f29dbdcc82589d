"""A job that is being written: pools, one pod template, and what the user still has to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Runtime

GPU: Final = "nvidia.com/gpu"
_SET_BY_LAUNCHER: Final = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
)
_NOT_FOR_JOBS: Final = ("restartPolicy", "nodeName", "activeDeadlineSeconds", "hostname", "subdomain")
_NAME_LENGTH: Final = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPool:
    """One pool: its workers, and which nodes they take."""

    name: str
    most: int
    least: int = 0
    spot: bool = False
    resources: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    processes: int | None = None

    def body(self) -> dict[str, Any]:
        """Return the pool as an entry of ``spec.workerPools``."""
        optional = {
            "minReplicas": self.least or None,
            "capacityType": "Spot" if self.spot else None,
            "nodeSelector": dict(self.node_selector) or None,
            "tolerations": [dict(each) for each in self.tolerations] or None,
            "resources": dict(self.resources) or None,
            "numProcPerWorker": self.processes,
        }
        return {"name": self.name, "maxReplicas": self.most} | {k: v for k, v in optional.items() if v is not None}


@dataclass(slots=True, kw_only=True)
class Draft:
    """A job in parts.

    Attributes:
        name, namespace: of the object.
        pools: in order of preference.
        pod: the pod's spec, without what pools have.
        container: name of the container that trains.
        command: its command line.
        least, most: workers over all pools.
        spec: further fields of ``spec``.
        notes: what could not be taken over, each with what to do.
    """

    name: str
    namespace: str | None = None
    pools: list[DraftPool] = field(default_factory=list)
    pod: dict[str, Any] = field(default_factory=dict)
    container: str = "trainer"
    command: list[str] = field(default_factory=list)
    least: int | None = None
    most: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def body(self, *, batch: int | None, epochs: int | None, steps: int | None) -> dict[str, Any]:
        """Return the job: for an unchanged script, or with a batch for a script that uses heterotrain."""
        metadata: dict[str, Any] = {"name": plain_name(self.name)}
        if self.namespace is not None:
            metadata["namespace"] = self.namespace
        elastic = {"minReplicas": self.least, "maxReplicas": self.most}
        spec: dict[str, Any] = {} if batch is not None else {"runtime": Runtime.TORCHRUN.value}
        if batch is not None:
            given = {"globalBatchSize": batch, "epochs": epochs, "steps": steps}
            spec["training"] = {name: value for name, value in given.items() if value is not None}
        spec |= {"elasticPolicy": {key: value for key, value in elastic.items() if value is not None}}
        spec |= {"workerPools": [pool.body() for pool in self.pools], **self.spec}
        spec["template"] = {"spec": self._pod()}
        return {
            "apiVersion": f"{keys.GROUP}/{keys.VERSION}", "kind": keys.KIND, "metadata": metadata, "spec": spec,
        }  # fmt: skip

    def _pod(self) -> dict[str, Any]:
        pod = {name: value for name, value in self.pod.items() if name not in _NOT_FOR_JOBS}
        containers = [dict(each) for each in pod.get("containers") or ()]
        main = next((each for each in containers if each.get("name") == self.container), None)
        if main is None:
            main = {"name": self.container}
            containers.insert(0, main)
        main["command"] = self.command
        main.pop("args", None)
        main.pop("resources", None)
        if "env" in main:
            main["env"] = [each for each in main["env"] if each.get("name") not in _SET_BY_LAUNCHER]
        if not main.get("image"):
            main["image"] = "FILL-IN/IMAGE"
            self.notes.append("the image is not named there: replace FILL-IN/IMAGE")
        return {**pod, "containers": containers}


def split_template(template: Mapping[str, Any], container: str | None) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return a pod's spec without its place, the name of the training container, and fields for a ``DraftPool``."""
    pod = dict(template.get("spec") or {})
    containers = [each for each in pod.get("containers") or () if isinstance(each, Mapping)]
    names = [str(each.get("name")) for each in containers]
    name = container if container in names else (names[0] if names else container or "trainer")
    main = next((each for each in containers if each.get("name") == name), {})
    place = {
        "resources": dict(main.get("resources") or {}),
        "node_selector": dict(pod.pop("nodeSelector", None) or {}),
        "tolerations": tuple(pod.pop("tolerations", None) or ()),
    }
    return pod, name, place


def plain_name(text: str) -> str:
    """Return a name for a job or a pool that the API server takes."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_NAME_LENGTH].rstrip("-")
    return found if found and found[0].isalpha() else f"job-{found}".rstrip("-")


def whole(value: Any, default: int) -> int:
    """Return a count of a manifest, or the default where it is not a positive number."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) > 0 else default
