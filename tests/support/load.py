"""Many jobs and one operator in memory, with a fake API server, watch, scheduler and kubelets."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.quantity import pod_requests
from heterotrain_operator.engine.app import CLOCKS, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.poller import Poller, Prom
from heterotrain_operator.kube.resources import JOBS, PODS, Resource
from heterotrain_operator.settings import PrometheusSettings, Settings
from heterotrain_operator.threads import Threads
from lab.scale.workload import Size, job, nodes

from support.executors import at_once
from support.fake_cluster import NOW_S
from support.fakes import Body, FakeKube

GPU = "nvidia.com/gpu"


class EchoKube(FakeKube):
    """Records every change, so that the watch can deliver it."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, Body, bool]] = []

    def _store(self, resource: Resource, body: Body) -> Body:
        stored = super()._store(resource, body)
        self.changes.append((resource.plural, copy.deepcopy(stored), False))
        return stored

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> None:
        gone = self.objects.get((resource.plural, namespace, name))
        await super().delete(resource, namespace, name, uid=uid)
        assert gone is not None
        self.changes.append((resource.plural, gone, True))


class LoadTest:
    """A busy cluster: jobs that together want more than its capacity, up to their ready workers."""

    def __init__(
        self,
        size: Size,
        *,
        more_nodes: int = 0,
        unschedulable: bool = False,
        clocks: Clocks = CLOCKS,
        threads: Threads | None = None,
    ) -> None:
        """Make the cluster.

        Args:
            size: of the workload.
            more_nodes: nodes that no pool selects.
            unschedulable: whether the scheduler reports pods for which there is no node.
            clocks: of the operator.
            threads: of the operator; without them, it does all work at once.
        """
        self._reports_unschedulable = unschedulable
        self._clocks = clocks
        self.kube = EchoKube()
        settings = Settings(leader_election=False, gather_s=0.0, status_interval_s=0.0)
        self.app = App(self.kube, settings, threads=threads or at_once(), clocks=clocks)
        self.passes = 0
        self.events = 0
        self._free: dict[str, int] = {}
        others = [copy.deepcopy(body) for body in nodes(Size(jobs=1, pods=more_nodes * 8))] if more_nodes else []
        for body in others:
            body["metadata"] |= {"name": f"other-{body['metadata']['name']}", "labels": {"gpu": "other"}}
        for body in (*nodes(size), *others):
            name = body["metadata"]["name"]
            self._free[name] = int(body["status"]["allocatable"][GPU])
            body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            body["metadata"]["resourceVersion"] = "1"
            self.kube.objects["nodes", "", name] = body
            self.app.events.node(body, deleted=False)
        self.nodes = {name: body["metadata"]["labels"] for (_, _, name), body in self.kube.objects.items()}
        for number in range(size.jobs):
            self.create(number)

    def read_from(self, prom: Prom) -> None:
        """Let the operator read telemetry, which it had none of so far."""
        app, settings = self.app, PrometheusSettings(url="http://x")
        app.poller = Poller(
            prom,
            app.store,
            app.queue,
            app.metrics,
            settings,
            learner=app.learner,
            clocks=self._clocks,
            threads=app.threads,
        )
        app.reconciler._sources = replace(app.reconciler._sources, telemetry_of=app.poller.telemetry_of)

    def create(self, number: int) -> None:
        """Create a job as a user does."""
        body = job(number)
        body["metadata"] |= {"generation": 1, "creationTimestamp": rfc3339(NOW_S + number)}
        self.kube._store(JOBS, body)

    async def settle(self) -> None:
        """Run operator, scheduler and kubelets until nothing changes any more."""
        while True:
            self._watch()
            await self.app.allocator.run_once()
            while len(self.app.queue):
                await self.app.reconciler.handle(await self.app.queue.get())
                self.passes += 1
                self._watch()
            await self.app.publisher.flush()
            if not self._play():
                return

    @property
    def ready(self) -> Counter[str]:
        """Ready workers by job."""
        pods = [body for (plural, _, _), body in self.kube.objects.items() if plural == PODS.plural]
        return Counter(
            each["metadata"]["labels"][keys.LABEL_JOB] for each in pods if each["status"]["phase"] == "Running"
        )

    def _watch(self) -> None:
        deliver = {
            "heterotrainjobs": self.app.events.job,
            "pods": self.app.events.pod,
            "configmaps": self.app.events.plan,
        }
        changes, self.kube.changes = self.kube.changes, []
        for plural, body, deleted in changes:
            if plural not in deliver:
                continue
            self.events += 1
            deliver[plural](body, deleted=deleted)
            if plural == PODS.plural and deleted and (node := body["spec"].get("nodeName")):
                self._free[node] += 1

    def _play(self) -> bool:
        """Schedule pods, and start those on a node; return whether anything happened."""
        happened = False
        for (plural, _, _), body in sorted(self.kube.objects.items()):
            if plural != PODS.plural:
                continue
            if "nodeName" not in body["spec"]:
                node = self._node_for(body)
                if node is not None:
                    body["spec"]["nodeName"] = node
                    self._free[node] -= 1
                    self.kube._store(PODS, body)
                    happened = True
                elif self._reports_unschedulable and not body["status"].get("conditions"):
                    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}
                    body["status"]["conditions"] = [{**refused, "lastTransitionTime": rfc3339(time.time())}]
                    self.kube._store(PODS, body)
                    happened = True
            elif body["status"]["phase"] != "Running":
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(NOW_S)}
                body["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}
                self.kube._store(PODS, body)
                happened = True
        return happened

    def _node_for(self, pod: Body) -> str | None:
        wanted = pod["spec"].get("nodeSelector") or {}
        need = int(pod_requests(pod["spec"])[GPU])
        fitting = (n for n, free in self._free.items() if free >= need and wanted.items() <= self.nodes[n].items())
        return next(fitting, None)


def bodies_of(load: LoadTest) -> list[tuple[str, str]]:
    """Return all objects as pairs of plural and JSON, as in a list."""
    return [(plural, json.dumps(body)) for (plural, _, _), body in load.kube.objects.items()]


def feed(app: App, bodies: list[tuple[str, str]]) -> None:
    """Deliver all objects to an operator, freshly parsed."""
    take: dict[str, Any] = {
        "nodes": app.events.node,
        "heterotrainjobs": app.events.job,
        "pods": app.events.pod,
        "configmaps": app.events.plan,
    }
    for plural, text in bodies:
        if plural in take:
            take[plural](json.loads(text), deleted=False)
