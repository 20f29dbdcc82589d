"""Integration tests of the operator on a real API server: simulated nodes and kubelets, and an operator process.

The real scheduler places pods on nodes without a kubelet. The test acts as the kubelet by writing the pods' status,
which makes every fault easy to stage.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending, Outcome, encode_outcome
from heterotrain_operator.cluster_state.parse import rfc3339, rfc3339_micro
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound
from heterotrain_operator.kube.resources import CONFIG_MAPS, EVENTS, JOBS, LEASES, NODES, PODS, Resource
from heterotrain_operator.kube.verbs import Body

from support.fake_cluster import pool
from support.plans import complete
from support.ports import free_port
from support.waiting import until

ROOT = Path(__file__).parents[2]
NAMESPACES = Resource("v1", "namespaces")
CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions")
DEPLOYMENTS = Resource("apps/v1", "deployments")
INSTALLED = "app.kubernetes.io/name=heterotrain-operator"
SILENCED = "tests.heterotrain.dev/replicas"
"""Annotation of a Deployment without replicas: how many it had."""
NODE_LEASES = "kube-node-lease"
RENEW_S = 2.0
"""Time between two signs of life of a node; after 12 s without one, the control plane takes it for lost."""


async def served(client: KubeClient) -> bool:
    """Return whether the API server lists jobs."""
    try:
        async for _ in client.list(JOBS):
            break
    except NotFound:
        return False
    return True


async def silence_installed_operators(client: KubeClient) -> None:
    """Scale installed operators to zero: two with different Leases would undo each other's work."""
    async for deployment in client.list(DEPLOYMENTS, labels=INSTALLED):
        if replicas := deployment["spec"].get("replicas"):
            await _scale(client, deployment, 0, silenced=str(replicas))

    async def gone() -> bool:
        return not [pod async for pod in client.list(PODS, labels=f"{INSTALLED},pod-template-hash")]

    await until(gone, "the installed operator has stopped")


async def restore_installed_operators(client: KubeClient) -> None:
    """Scale operators that these tests, or earlier ones that were killed, have silenced to what they were."""
    async for deployment in client.list(DEPLOYMENTS, labels=INSTALLED):
        if replicas := deployment["metadata"].get("annotations", {}).get(SILENCED):
            await _scale(client, deployment, int(replicas), silenced=None)


async def _scale(client: KubeClient, deployment: Body, replicas: int, *, silenced: str | None) -> None:
    metadata = deployment["metadata"]
    patch = {"metadata": {"annotations": {SILENCED: silenced}}, "spec": {"replicas": replicas}}
    await client.merge(DEPLOYMENTS, metadata["namespace"], metadata["name"], patch)


@asynccontextmanager
async def own_namespace(kube: KubeClient) -> AsyncIterator[str]:
    """Create a namespace of a test's own, and remove it in the end."""
    name = await new_namespace(kube)
    try:
        yield name
    finally:
        await remove_namespace(kube, name)


async def new_namespace(kube: KubeClient) -> str:
    """Create a namespace and return its name."""
    name = f"ht-{secrets.token_hex(4)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "namespace": ""}}
    await kube.create(NAMESPACES, body)
    return name


async def remove_namespace(kube: KubeClient, name: str) -> None:
    """Delete jobs and pods at once (without a kubelet, nothing confirms their end), then the namespace."""
    async for job in kube.list(JOBS, name):
        await kube.delete(JOBS, name, job["metadata"]["name"], uid=job["metadata"]["uid"])
    async for pod in kube.list(PODS, name):
        await force_delete(kube, pod)
    found = await kube.get(NAMESPACES, None, name)
    with suppress(KubeError):
        await kube.delete(NAMESPACES, "", name, uid=found["metadata"]["uid"])


async def force_delete(kube: KubeClient, pod: Body) -> None:
    """Remove a pod from the API as a kubelet does once its containers have ended."""
    metadata = pod["metadata"]
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
    with suppress(NotFound, Conflict):
        await kube._call("DELETE", PODS.path(metadata["namespace"], metadata["name"]), body=options)


@contextmanager
def signs_of_life() -> Iterator[dict[str, str]]:
    """Renew the Leases of nodes as kubelets do, in a thread: a test may stop its event loop for longer than that.

    Yields:
        The uid of each node by its name; tests add their nodes.
    """
    nodes: dict[str, str] = {}
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_renew_leases(nodes, ended)), daemon=True)
    thread.start()
    try:
        yield nodes
    finally:
        ended.set()
        thread.join()


async def _renew_leases(nodes: Mapping[str, str], ended: threading.Event) -> None:
    kube = KubeClient(await load_configuration())
    while not await asyncio.to_thread(ended.wait, RENEW_S):
        for name, uid in tuple(nodes.items()):
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
            body = {
                "apiVersion": LEASES.api_version, "kind": "Lease",
                "metadata": {"name": name, "namespace": NODE_LEASES, "ownerReferences": [owner]},
                "spec": {"holderIdentity": name, "renewTime": rfc3339_micro(time.time())},
            }  # fmt: skip
            with suppress(KubeError):
                await kube.apply(LEASES, body)
    await kube.close()


class Cluster:
    """A test's namespace and nodes.

    Attributes:
        container: name of the container that trains, in the status of pods.
    """

    def __init__(self, kube: KubeClient, namespace: str, nodes: dict[str, str] | None = None) -> None:
        """``nodes`` gets the uid of each node by its name, for ``signs_of_life``."""
        self.kube = kube
        self.namespace = namespace
        self.container = "main"
        self._nodes = {} if nodes is None else nodes

    async def add_node(self, pool_name: str, *, cpu: str = "4", suffix: str = "") -> str:
        """Create a node without a kubelet that only this namespace's pods tolerate, and return its name.

        Args:
            pool_name: the pool whose workers it takes.
            cpu: its cores.
            suffix: distinguishes several nodes of one pool.
        """
        name = f"{self.namespace}-{pool_name}{suffix}"
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "namespace": "", "labels": {"ht-test": self.namespace, "pool": pool_name}},
            "spec": {"taints": [{"key": "ht-test", "value": self.namespace, "effect": "NoSchedule"}]},
        }
        self._nodes[name] = (await self.kube.create(NODES, body))["metadata"]["uid"]
        resources = {"cpu": cpu, "memory": "8Gi", "pods": "20"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "simulated"}
        patch = {"status": {"allocatable": resources, "capacity": resources, "conditions": [ready]}}
        await self.kube._call(
            "PATCH", NODES.path(None, name, "status"), body=patch, content_type="application/merge-patch+json"
        )
        await self.set_taints(name)
        return name

    async def set_taints(self, node: str, *keys_: str) -> None:
        """Give a node these taints in addition to the one that repels other pods."""
        taints = [{"key": "ht-test", "value": self.namespace, "effect": "NoSchedule"}]
        taints += [{"key": key, "effect": "NoSchedule"} for key in keys_]
        await self.kube._call(
            "PATCH",
            NODES.path(None, node),
            body={"spec": {"taints": taints}},
            content_type="application/merge-patch+json",
        )

    async def remove_nodes(self) -> None:
        """Delete the nodes of this test; their Leases go with them."""
        async for node in self.kube.list(NODES, labels=f"ht-test={self.namespace}"):
            self._nodes.pop(node["metadata"]["name"], None)
            await self.kube.delete(NODES, "", node["metadata"]["name"], uid=node["metadata"]["uid"])

    def pool(self, name: str, **fields: Any) -> Body:
        """Return a pool on this test's nodes."""
        selector = {"pool": name, "ht-test": self.namespace}
        tolerations = [{"key": "ht-test", "operator": "Exists"}]
        return pool(name, **{"nodeSelector": selector, "tolerations": tolerations, **fields})

    def job(self, *pools: Body, name: str = "job", **spec: Any) -> Body:
        """Return a job's manifest."""
        return {
            "apiVersion": JOBS.api_version,
            "kind": keys.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "training": {"globalBatchSize": 100},
                "workerPools": list(pools) or [self.pool("a"), self.pool("b")],
                "template": {"spec": {"containers": [{"name": "main", "image": "image.invalid/none:1"}]}},
                **spec,
            },
        }

    async def create(self, body: Body) -> Body:
        """Create a job."""
        return await self.kube.create(JOBS, body)

    async def status(self, name: str = "job") -> Body:
        """Return a job's status."""
        found: Body = (await self.kube.get(JOBS, self.namespace, name)).get("status") or {}
        return found

    async def condition(self, kind: str, name: str = "job") -> tuple[str, str, str]:
        """Return status, reason and message of a job's condition; empty without one."""
        for each in (await self.status(name)).get("conditions", []):
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    async def edit(self, patch: Body, name: str = "job") -> Body:
        """Merge a patch into a job's spec."""
        return await self.kube.merge(JOBS, self.namespace, name, {"spec": patch})

    async def pods(self, job: str = "job") -> dict[str, Body]:
        """Return the job's pods by name."""
        found = self.kube.list(PODS, self.namespace, labels=f"{keys.LABEL_JOB}={job}")
        return {pod["metadata"]["name"]: pod async for pod in found}

    async def plan(self, job: str = "job") -> Body:
        """Return the plan's JSON; empty without a plan."""
        try:
            found = await self.kube.get(CONFIG_MAPS, self.namespace, keys.plan_name(job))
        except NotFound:
            return {}
        return complete(found["data"][keys.PLAN_KEY])

    async def members(self, job: str = "job") -> list[str]:
        """Return the names of the pods that the plan names, once for each rank."""
        return [rank["worker"] for rank in (await self.plan(job)).get("ranks", [])]

    async def reasons(self) -> dict[str, int]:
        """Return the number of Events by reason."""
        found: dict[str, int] = {}
        async for event in self.kube.list(EVENTS, self.namespace):
            if event["involvedObject"]["kind"] == keys.KIND:
                found[event["reason"]] = found.get(event["reason"], 0) + event.get("count", 1)
        return found

    # --- the kubelet ---

    async def write_pod_status(self, name: str, status: Body) -> None:
        """Write a pod's status as its kubelet would."""
        path = PODS.path(self.namespace, name, "status")
        await self.kube._call("PATCH", path, body={"status": status}, content_type="application/merge-patch+json")

    async def scheduled(self, count: int, job: str = "job") -> list[str]:
        """Wait until this many pods have nodes, and return their names."""

        async def probe() -> list[str]:
            placed = [name for name, pod in (await self.pods(job)).items() if pod["spec"].get("nodeName")]
            return sorted(placed) if len(placed) >= count else []

        found: list[str] = await until(probe, f"{count} pods of {job} have nodes")
        return found

    async def run(self, *names: str) -> None:
        """Set these pods running and ready."""
        now = rfc3339(1_800_000_000)
        for number, name in enumerate(names):
            await self.write_pod_status(
                name,
                {
                    "phase": "Running",
                    "podIP": f"10.99.0.{number + 1}",
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
                    "containerStatuses": [self._container({"running": {"startedAt": now}}, ready=True)],
                },
            )

    async def end(self, name: str, ending: Ending, *, reason: str = "") -> None:
        """End a pod's container with an outcome."""
        message = encode_outcome(Outcome(ending=ending, reason=reason, epoch=1, step=2))
        code = 1 if ending is Ending.FAILED else 0
        ended = {"terminated": {"exitCode": code, "message": message, "finishedAt": rfc3339(1_800_000_000)}}
        phase = "Failed" if code else "Succeeded"
        status: Body = {"phase": phase, "containerStatuses": [self._container(ended, ready=False)]}
        await self.write_pod_status(name, status)

    async def crash(self, name: str, *, exit_code: int, reason: str = "Error", condition: str = "") -> None:
        """End a pod's container without an outcome, as the kubelet reports it.

        Args:
            name: of the pod.
            exit_code: of the container.
            reason: of the container's end.
            condition: type of a condition of the pod that is true.
        """
        ended = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": rfc3339(1_800_000_000)}}
        status: Body = {"phase": "Failed", "containerStatuses": [self._container(ended, ready=False)]}
        if condition:
            status["conditions"] = [{"type": condition, "status": "True", "lastTransitionTime": rfc3339(1_800_000_000)}]
        await self.write_pod_status(name, status)

    async def confirm_deletions(self) -> None:
        """Remove pods that are being deleted."""
        async for pod in self.kube.list(PODS, self.namespace):
            if "deletionTimestamp" in pod["metadata"]:
                await force_delete(self.kube, pod)

    async def started(self, count: int, job: str = "job") -> list[str]:
        """Run a job's first pods until a plan names them, and return their names."""
        names = (await self.scheduled(count, job))[:count]
        await self.run(*names)

        async def named() -> bool:
            return set(await self.members(job)) == set(names)

        await until(named, f"a plan of {job} with {names}")
        return names

    def _container(self, state: Body, *, ready: bool) -> Body:
        about = {"name": self.container, "image": "none", "imageID": "none", "restartCount": 0}
        return {**about, "ready": ready, "state": state}


class Operator:
    """The operator as a process that watches one namespace, or several."""

    def __init__(self, namespace: str, log: Path, *options: str, watched: Sequence[str] = ()) -> None:
        """``namespace`` holds its Lease, and is the only one that it watches without ``watched``."""
        self._namespace = namespace
        self._watched = watched or (namespace,)
        self._log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.health_port, self.metrics_port = free_port(), free_port()

    async def start(self) -> None:
        """Start it and wait until it leads."""
        with self._log.open("ab") as log:
            flags = {
                "namespace": self._namespace,
                "watch-namespaces": ",".join(self._watched),
                "listen": "127.0.0.1",
                "health-port": self.health_port,
                "metrics-port": self.metrics_port,
                "gather-seconds": 1,
                "status-interval-seconds": 0.2,
                "lease-duration-seconds": 10,
            }
            options = [f"--{name}={value}" for name, value in flags.items()]
            command = [sys.executable, "-m", "heterotrain_operator", "run", *options, *self._options]
            self._process = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=log)
        await until(self.leads, "the operator leads", timeout_s=240)

    async def leads(self) -> bool:
        """Return whether it leads."""
        return await self.metric("heterotrain_operator_leader") == 1.0

    async def metric(self, name: str) -> float | None:
        """Return one of its own metrics; ``None`` without an answer."""
        try:
            url = f"http://127.0.0.1:{self.metrics_port}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                lines = (await response.text()).splitlines()
        except aiohttp.ClientError:
            return None
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)

    async def kill(self) -> None:
        """Kill it without warning."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def stop(self) -> int:
        """Terminate it and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait)
