"""Remove a spot node the way a cloud does, and bring it back."""

from __future__ import annotations

import json

from heterotrain_core.contract import keys
from local_cluster import control

from lab.cluster import Cluster, wait_for
from lab.jobs import Job

SPOT_NOTICE = "aws-node-termination-handler/spot-itn=true:NoSchedule"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
"""Set by a person who knows that a node is off: Kubernetes then removes its pods."""


def node_of_pool(cluster: Cluster, pool: str) -> str:
    """Return the name of the first node of a pool.

    Raises:
        ClusterError: no node appears within a minute.
    """

    def probe() -> str | None:
        found = cluster.list("nodes", f"{keys.LABEL_POOL}={pool}")
        return str(found[0]["metadata"]["name"]) if found else None

    return wait_for(probe, f"a node of pool {pool}", timeout_s=60)


def evict(job: Job, pod: str) -> None:
    """Evict a pod through the Eviction API, as a drain does."""
    namespace = job.cluster.namespace
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    job.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def kill(job: Job, pod: str) -> None:
    """Send SIGKILL to the training processes of a pod: all that run the script, except the pod's first process."""
    command = (
        "for p in /proc/[0-9]*; do n=${p#/proc/}; "
        '[ "$n" != 1 ] && [ "$n" != $$ ] && grep -qa /script/ "$p/cmdline" && kill -9 "$n"; done; true'
    )
    job.cluster.kubectl("exec", pod, "-c", "trainer", "--", "sh", "-c", command)


def take_away(cluster: Cluster, node: str) -> None:
    """Announce the interruption (taint), evict the node's pods, cut network and power, and delete the node object."""
    cluster.kubectl("taint", "node", node, SPOT_NOTICE, "--overwrite")
    cluster.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s", timeout_s=90
    )
    control.power_off(node)
    cluster.delete("node", node)


def give_back(cluster: Cluster, node: str) -> None:
    """Power the node on and wait until it has registered again and is Ready."""
    control.power_on(node)
    wait_ready(cluster, node)
    left = {each["key"] for each in (cluster.get("node", node) or {}).get("spec", {}).get("taints", [])}
    for taint in (SPOT_NOTICE, OUT_OF_SERVICE):
        if (key := taint.partition("=")[0]) in left:  # an old node object keeps its taints
            cluster.kubectl("taint", "node", node, f"{key}-")


def wait_ready(cluster: Cluster, node: str) -> None:
    """Wait until a node is Ready.

    Raises:
        ClusterError: it is not within 180 s.
    """
    wait_for(lambda: is_ready(cluster, node), f"node {node} to be Ready", timeout_s=180)


def is_ready(cluster: Cluster, node: str) -> bool:
    """Return whether a node exists and is Ready."""
    found = cluster.get("node", node)
    conditions = (found or {}).get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
