"""The real Kueue as a process of this machine, next to a control plane without nodes.

The manifests are those of Kueue's own module. Two things differ from a cluster. The Service of its webhooks has the
type ExternalName and leads to this machine. And no kubelet mounts its certificate: this module copies it from the
Secret, where Kueue puts it, into the folder where Kueue reads it.
"""

from __future__ import annotations

import base64
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import NotFound
from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.verbs import Body
from local_cluster import paths, toolchain
from local_cluster.bare import LOOPBACK, ControlPlane, free_port
from local_cluster.process import Problem, wait_until

NAMESPACE, SERVICE, SECRET = "kueue-system", "kueue-webhook-service", "kueue-webhook-server-cert"  # a name
GROUP = "kueue.x-k8s.io"
VERSION = f"{GROUP}/v1beta1"
FLAVORS = Resource(VERSION, "resourceflavors")
CLUSTER_QUEUES, QUEUES = Resource(VERSION, "clusterqueues"), Resource(VERSION, "localqueues")
WORKLOADS = Resource(VERSION, "workloads")
GATE = f"{GROUP}/admission"
QUEUE = "training"
"""Name of each namespace's queue."""


@contextmanager
def kueue(plane: ControlPlane) -> Iterator[None]:
    """Run Kueue with its integration of plain pods; its webhooks answer when this begins.

    Raises:
        Problem: it does not start.
    """
    webhooks, health = free_port(), free_port()
    certificates = plane.folder / "kueue-certificates"
    certificates.mkdir()
    configuration = plane.folder / "kueue.yaml"
    configuration.write_text(yaml.safe_dump(_configuration(webhooks, health, certificates)))
    manifests = [*_namespace(), *definitions(), *_webhooks(webhooks)]
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(manifests))
    plane.kubectl("wait", "--for=condition=Established", "--all", "--timeout=180s", "customresourcedefinitions")
    plane.commands["kueue"] = [
        f"{paths.programs()}/kueue", f"--config={configuration}", f"--kubeconfig={plane.kubeconfig}",
        "--feature-gates=VisibilityOnDemand=false", "--zap-log-level=3",
    ]  # fmt: skip
    plane.start("kueue")
    try:
        wait_until(lambda: _certified(plane, certificates), "Kueue's certificate", timeout_s=180)
        wait_until(lambda: _answers(health), "Kueue is ready", timeout_s=180)
        wait_until(lambda: _admits(plane), "Kueue's webhooks answer", timeout_s=180)
        yield
    finally:
        plane.stop("kueue")


def _configuration(webhooks: int, health: int, certificates: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": LOOPBACK, "port": webhooks, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"qps": 200, "burst": 400},
        "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
        "integrations": {"frameworks": ["pod"]},
    }


def _namespace() -> list[dict[str, Any]]:
    inside = {"namespace": NAMESPACE}
    spec = {"type": "ExternalName", "externalName": "localhost"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE, **inside}, "spec": spec},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, **inside}},
    ]


def definitions() -> list[dict[str, Any]]:
    """Return the definitions of Kueue's own kinds."""
    folder = toolchain.sources(toolchain.KUEUE) / "config/components/crd/bases"
    return [document for path in sorted(folder.glob("*.yaml")) for document in documents(path)]


def _webhooks(port: int) -> list[dict[str, Any]]:
    found = documents(toolchain.sources(toolchain.KUEUE) / "config/components/webhook/manifests.yaml")
    for document in found:
        # Kustomize gives the names their prefix, and the webhooks of pods leave Kueue's own namespace out.
        document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
        for webhook in document["webhooks"]:
            webhook["clientConfig"]["service"] |= {"name": SERVICE, "namespace": NAMESPACE, "port": port}
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of Kueue's module."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def _certified(plane: ControlPlane, folder: Path) -> bool:
    """Copy the certificate once Kueue has made it, as a kubelet does.

    Raises:
        Problem: Kueue has ended.
    """
    if plane.processes["kueue"].poll() is not None:
        raise Problem(f"Kueue has ended: {(plane.folder / 'kueue.log').read_text()[-1500:]}")
    secret = yaml.safe_load(plane.kubectl("get", "secret", SECRET, "--namespace", NAMESPACE, "-o", "yaml"))
    data: Mapping[str, str] = secret.get("data") or {}
    for name in ("tls.key", "tls.crt"):  # Kueue begins once the certificate is there
        if name in data:
            (folder / name).write_bytes(base64.b64decode(data[name]))
    return "tls.crt" in data


def _answers(health: int) -> bool:
    """Return whether Kueue reports itself ready."""
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{health}/readyz", timeout=2) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def _admits(plane: ControlPlane) -> bool:
    """Return whether the API server asks Kueue about pods: a pod with a queue's label gets its gate."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": "default", "labels": {f"{GROUP}/queue-name": "none"}},
        "spec": {"containers": [{"name": "main", "image": "image.invalid/none:1"}]},
    }
    try:
        answer = plane.kubectl("create", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=yaml.safe_dump(pod))
    except Problem:
        return False
    return "schedulingGates" in yaml.safe_load(answer)["spec"]


class Queue:
    """The queue of one namespace, with a quota of cores."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._name = namespace

    async def create(self, cores: int) -> None:
        """Create the queue and what it needs."""
        await self._kube.create(FLAVORS, self._body("ResourceFlavor", {}))
        await self._kube.create(CLUSTER_QUEUES, self._body("ClusterQueue", self._quota(cores)))
        queue = self._body("LocalQueue", {"clusterQueue": self._name})
        queue["metadata"] = {"name": QUEUE, "namespace": self._name}
        await self._kube.create(QUEUES, queue)

    async def allow(self, cores: int) -> None:
        """Change the quota."""
        await self._kube.merge(CLUSTER_QUEUES, "", self._name, {"spec": self._quota(cores)})

    async def reserved(self) -> str:
        """Return the cores that Kueue has reserved for pods; empty before the first count."""
        status = (await self._kube.get(CLUSTER_QUEUES, None, self._name)).get("status") or {}
        flavors = status.get("flavorsReservation") or []
        return str(flavors[0]["resources"][0]["total"]) if flavors else ""

    async def workloads(self) -> list[Body]:
        """Return Kueue's workloads in the namespace."""
        return [each async for each in self._kube.list(WORKLOADS, self._name)]

    async def is_unused(self) -> bool:
        """Return whether no quota is reserved and Kueue keeps no workload."""
        return await self.reserved() == "0" and not await self.workloads()

    async def remove(self) -> None:
        """Delete the objects that have no namespace."""
        for resource in (CLUSTER_QUEUES, FLAVORS):
            with suppress(NotFound):
                found = await self._kube.get(resource, None, self._name)
                await self._kube.delete(resource, "", self._name, uid=found["metadata"]["uid"])

    def _body(self, kind: str, spec: Body) -> Body:
        return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": self._name, "namespace": ""}, "spec": spec}

    def _quota(self, cores: int) -> Body:
        flavor = {"name": self._name, "resources": [{"name": "cpu", "nominalQuota": str(cores)}]}
        return {"namespaceSelector": {}, "resourceGroups": [{"coveredResources": ["cpu"], "flavors": [flavor]}]}
