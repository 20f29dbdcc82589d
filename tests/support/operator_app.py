"""An operator with a fake API server, for tests of its passes over jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import (
    parse_job,
    parse_node,
)
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.grant import UNLIMITED
from heterotrain_operator.engine.app import CLOCKS, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.settings import Settings
from heterotrain_operator.threads import Threads

from support.executors import at_once
from support.fake_cluster import FakeCluster, pool
from support.fakes import FakeKube

KEY = JobKey("ns", "job")


def an_app(
    kube: FakeKube,
    cluster: FakeCluster | None = None,
    clocks: Clocks = CLOCKS,
    threads: Threads | None = None,
    **settings: Any,
) -> App:
    """Return an operator that has listed a cluster."""
    app = without_competition(kube, status_interval_s=0.0, clocks=clocks, threads=threads, **settings)
    cluster = cluster or FakeCluster().with_nodes("a", "b", "c")
    for body in cluster.nodes.values():
        app.store.nodes.put(parse_node(body))
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    return app


def deliver_pods_and_plan(app: App, kube: FakeKube, cluster: FakeCluster) -> None:
    """Put a job's pods and plan into the API server, and let the operator see them."""
    for body in cluster.pods.values():
        kube.objects["pods", "ns", body["metadata"]["name"]] = body
        app.events.pod(body, deleted=False)
    assert cluster.plan is not None
    kube.objects["configmaps", "ns", "job-plan"] = cluster.plan
    app.events.plan(cluster.plan, deleted=False)


def without_competition(
    kube: FakeKube,
    *,
    status_interval_s: float,
    clocks: Clocks = CLOCKS,
    threads: Threads | None = None,
    **given: Any,
) -> App:
    """Return an operator whose jobs need not wait for an allocation; without threads, it does all work at once."""
    settings = Settings(leader_election=False, status_interval_s=status_interval_s, **given)
    app = App(kube, settings, threads=threads or at_once(), clocks=clocks)
    app.reconciler._sources = replace(app.reconciler._sources, grant_of=lambda _: UNLIMITED)
    return app


def failing(verb: str, plural: str, error: KubeError) -> Callable[[str, str, str], KubeError | None]:
    return lambda v, p, _: error if (v, p) == (verb, plural) else None


def many_workers(count: int) -> FakeCluster:
    """Return a cluster with room for a job of so many small workers."""
    small = pool("a", maxReplicas=count, resources={"limits": {"cpu": "10m"}})
    cluster = FakeCluster(small, spec={"training": {"globalBatchSize": 1000}}).with_nodes("a", cpu="64")
    cluster.nodes["a"]["status"]["allocatable"]["pods"] = "200"
    return cluster


def condition(kube: FakeKube, kind: str) -> tuple[str, str]:
    """Return reason and message of a condition in the written status."""
    conditions = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
    return next((c["reason"], c["message"]) for c in conditions if c["type"] == kind)


def labelled_config_map(text: str, *, name: str = "job", **metadata: object) -> dict[str, Any]:
    """Return a ConfigMap that looks like a job's plan but belongs to no job."""
    labels = {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: name}
    identity = {"name": keys.plan_name(name), "namespace": "ns", "uid": "foreign", "resourceVersion": "7"}
    return {"kind": "ConfigMap", "metadata": {**identity, "labels": labels, **metadata}, "data": {"plan.json": text}}
