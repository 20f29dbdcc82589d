"""The installed chart: its own test, a second replica, a second release, and upgrade and removal during a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from heterotrain_core.contract import keys
from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for
from lab.install import OPERATOR_NAMESPACE, install, rollout
from lab.jobs import Job

if TYPE_CHECKING:
    from conftest import Start

OPERATOR = "heterotrain-operator"
CHART = str(REPOSITORY / "helm/heterotrain")


def test_the_chart_s_own_test_passes(installed: Cluster) -> None:
    """`helm test` asks the operator and the API server from inside the cluster."""
    test = ("helm", "test", "heterotrain", "--namespace", OPERATOR_NAMESPACE, "--timeout", "600s")
    assert "Succeeded" in installed.run(*test, timeout_s=620)


@contextmanager
def replicas(cluster: Cluster, count: int) -> Iterator[None]:
    """Run ``count`` replicas of the operator; scale back to one afterwards."""
    scale = ("kubectl", "-n", OPERATOR_NAMESPACE, "scale", f"deployment/{OPERATOR}")
    cluster.run(*scale, f"--replicas={count}")
    try:
        rollout(cluster, OPERATOR_NAMESPACE, OPERATOR)
        yield
    finally:
        cluster.run(*scale, "--replicas=1")
        rollout(cluster, OPERATOR_NAMESPACE, OPERATOR)


def leader(cluster: Cluster) -> str | None:
    """Return the existing replica that holds the Lease; ``None`` while no existing replica holds it."""
    operators = Cluster(environment=cluster.environment, namespace=OPERATOR_NAMESPACE)
    lease = operators.get("lease", OPERATOR) or {}
    holder = lease.get("spec", {}).get("holderIdentity")
    names = [pod["metadata"]["name"] for pod in operators.list("pods", f"app.kubernetes.io/name={OPERATOR}")]
    return holder if holder in names else None


def test_a_second_replica_takes_over_and_serves_jobs(installed: Cluster) -> None:
    """After the leader is killed without a signal, the other replica leads and processes a new job."""
    with replicas(installed, 2):
        first = wait_for(lambda: leader(installed), "a leader", timeout_s=120)
        installed.run("kubectl", "-n", OPERATOR_NAMESPACE, "delete", "pod", first, "--grace-period=0", "--force")
        wait_for(
            lambda: found if (found := leader(installed)) and found != first else None,
            "another replica to lead",
            timeout_s=120,
        )
        cluster = Cluster(environment=installed.environment, namespace="default")
        cluster.apply(job_without_nodes())
        try:
            wait_for(
                lambda: (cluster.get(keys.PLURAL, "nowhere") or {}).get("status", {}).get("observedGeneration"),
                "the new leader to process a job",
                timeout_s=60,
            )
        finally:
            cluster.delete(keys.PLURAL, "nowhere")


def test_a_running_job_outlives_upgrade_and_removal_of_the_operator(installed: Cluster, start: Start) -> None:
    """The same pods keep training; the removal leaves only the CRD behind, and a new operator takes the job over."""
    running = start(epochs=None)
    running.job.wait_members(3, timeout_s=180)
    before = uids(running.job.pods())
    assert "already manages the jobs of all namespaces" in refusal(installed, "second")

    options = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "600s")
    change = ("--reuse-values", "--set", "operator.workers=3")
    installed.run("helm", "upgrade", "heterotrain", CHART, *options, *change, timeout_s=620)
    running.wait_steps(running.steps() + 5)
    installed.run("helm", "uninstall", "heterotrain", *options, timeout_s=620)
    running.wait_steps(running.steps() + 5)
    kinds = "clusterroles,clusterrolebindings,crds,validatingwebhookconfigurations,mutatingwebhookconfigurations"
    left = installed.run("kubectl", "get", kinds, "-l", "app.kubernetes.io/managed-by=Helm", "-o", "name").split()
    assert left == [f"customresourcedefinition.apiextensions.k8s.io/{keys.PLURAL}.{keys.GROUP}"]
    assert "belongs to release heterotrain" in refusal(installed, "second")
    assert uids(running.job.pods()) == before

    install(installed)
    pod = running.job.pods()[0]["metadata"]
    lost = pod["uid"]
    running.job.cluster.delete("pod", pod["name"])
    remaining = before - {lost}
    wait_for(lambda: len(uids(running.job.pods()) - before) == 1, "another worker in its place", timeout_s=120)
    wait_for(
        lambda: remaining < members(running.job) and lost not in members(running.job), "a plan with it", timeout_s=120
    )
    running.stop()


def uids(pods: list[dict[str, Any]]) -> set[str]:
    """Return the uids of the pods that are not being deleted."""
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def members(job: Job) -> set[str]:
    """Return the uids of the workers in the current plan."""
    plan = job.plan()
    return {rank.worker_uid for rank in plan.ranks} if plan else set()


def refusal(cluster: Cluster, release: str) -> str:
    """Return the error of a dry-run installation under another release name."""
    with pytest.raises(ClusterError) as refused:
        cluster.run("helm", "install", release, CHART, "--namespace", "default", "--dry-run=server")
    return str(refused.value)


def job_without_nodes() -> dict[str, Any]:
    """Return a job whose pool has no nodes."""
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}",
        "kind": keys.KIND,
        "metadata": {"name": "nowhere"},
        "spec": {
            "training": {"globalBatchSize": 8},
            "workerPools": [{"name": "none", "nodeSelector": {keys.LABEL_POOL: "none"}}],
            "template": {"spec": {"containers": [{"name": "trainer", "image": "heterotrain/trainer:dev"}]}},
        },
    }
