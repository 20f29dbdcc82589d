"""Takes a spot node away the way a cloud does, and gives it back."""

from __future__ import annotations

from collections.abc import Callable

from heterotrain_core.contract import keys
from local_cluster import control

from lab.cluster import Cluster, wait_for

SPOT_NOTICE = "aws-node-termination-handler/spot-itn=true:NoSchedule"


def node_of_pool(cluster: Cluster, pool: str) -> str:
    """Return the name of the first node of a pool.

    Raises:
        ClusterError: there is none within a minute.
    """

    def probe() -> str | None:
        found = cluster.list("nodes", f"{keys.LABEL_POOL}={pool}")
        return str(found[0]["metadata"]["name"]) if found else None

    return wait_for(probe, f"a node of pool {pool}", timeout_s=60)


def take_away(cluster: Cluster, node: str, *, evict: Callable[[], None] = lambda: None) -> None:
    """Announce the interruption (taint), evict the node's pods, cut cable and power, and remove the node object."""
    cluster.kubectl("taint", "node", node, SPOT_NOTICE, "--overwrite")
    evict()
    cluster.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s", timeout_s=90
    )
    control.power_off(node)
    cluster.delete("node", node)


def give_back(cluster: Cluster, node: str) -> None:
    """Power the node on and wait until it has registered again and is Ready."""
    control.power_on(node)

    def ready() -> bool:
        found = cluster.get("node", node)
        conditions = (found or {}).get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    wait_for(ready, f"node {node} to be Ready", timeout_s=90)
    cluster.kubectl("taint", "node", node, "aws-node-termination-handler/spot-itn-", "--overwrite") if _tainted(
        cluster, node
    ) else None


def _tainted(cluster: Cluster, node: str) -> bool:
    found = cluster.get("node", node) or {}
    return any(
        each["key"].startswith("aws-node-termination-handler") for each in found.get("spec", {}).get("taints", [])
    )
