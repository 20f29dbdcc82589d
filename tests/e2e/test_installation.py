"""The installed chart: its own test passes, and of two replicas one leads and the other takes over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from heterotrain_core.contract import keys
from lab.cluster import Cluster, wait_for
from lab.install import OPERATOR_NAMESPACE, rollout

OPERATOR = "heterotrain-operator"


def test_the_chart_s_own_test_passes(installed: Cluster) -> None:
    """`helm test` asks the operator and the API server from inside the cluster."""
    said = installed.run("helm", "test", "heterotrain", "--namespace", OPERATOR_NAMESPACE, "--timeout", "90s", timeout_s=100)  # fmt: skip
    assert "Succeeded" in said


@contextmanager
def replicas(cluster: Cluster, count: int) -> Iterator[None]:
    """Run so many operators; one again afterwards."""
    scale = ("kubectl", "-n", OPERATOR_NAMESPACE, "scale", f"deployment/{OPERATOR}")
    cluster.run(*scale, f"--replicas={count}")
    try:
        rollout(cluster, OPERATOR_NAMESPACE, OPERATOR)
        yield
    finally:
        cluster.run(*scale, "--replicas=1")
        rollout(cluster, OPERATOR_NAMESPACE, OPERATOR)


def leader(cluster: Cluster) -> str | None:
    """Return the replica that holds the Lease, among those that exist; ``None`` while nobody does."""
    operators = Cluster(environment=cluster.environment, namespace=OPERATOR_NAMESPACE)
    lease = operators.get("lease", OPERATOR) or {}
    holder = lease.get("spec", {}).get("holderIdentity")
    names = [pod["metadata"]["name"] for pod in operators.list("pods", f"app.kubernetes.io/name={OPERATOR}")]
    return holder if holder in names else None


def test_a_second_replica_takes_over_and_serves_jobs(installed: Cluster) -> None:
    """The leader is killed without a word; the other leads, and a job that is applied then is looked at."""
    with replicas(installed, 2):
        first = wait_for(lambda: leader(installed), "a leader", timeout_s=60)
        installed.run("kubectl", "-n", OPERATOR_NAMESPACE, "delete", "pod", first, "--grace-period=0", "--force")
        wait_for(
            lambda: found if (found := leader(installed)) and found != first else None,
            "another replica to lead",
            timeout_s=60,
        )
        cluster = Cluster(environment=installed.environment, namespace="default")
        cluster.apply(nowhere())
        try:
            wait_for(
                lambda: (cluster.get(keys.PLURAL, "nowhere") or {}).get("status", {}).get("observedGeneration"),
                "the new leader to look at a job",
                timeout_s=30,
            )
        finally:
            cluster.delete(keys.PLURAL, "nowhere")


def nowhere() -> dict[str, Any]:
    """Return a job whose pool has no node."""
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
