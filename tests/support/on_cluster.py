"""What end-to-end tests do on the real cluster around their jobs."""

from __future__ import annotations

from lab.cluster import Cluster, ClusterError
from lab.install import OPERATOR_NAMESPACE
from lab.jobs import Job

OTHER_IMAGE = "docker.io/heterotrain/trainer:other"
OF_POOL = {"FROM_COMMAND": "command of the pool", "FROM_VARIABLE": "variable of the pool"}
"""Variables that only the workers of a pool with an image of its own have, by where they come from."""


def remove_namespace(cluster: Cluster, *, waits: bool = True) -> None:
    """Delete the cluster's namespace; with ``waits``, return only when it is gone."""
    options = ["--timeout=600s"] if waits else ["--wait=false"]
    cluster.run("kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", *options, timeout_s=620)


def diagnostics(job: Job) -> str:
    """Return the object, its pods, its events, and the last log lines of the pods and of the operator."""
    commands = [
        ("get", "htj", job.name, "-o", "yaml"),
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-l", f"heterotrain.dev/job={job.name}", "--tail=40", "--prefix", "--ignore-errors"),
        ("-n", OPERATOR_NAMESPACE, "logs", "deployment/heterotrain-operator", "--tail=60"),
    ]
    outputs = []
    for command in commands:
        try:
            outputs.append(f"$ kubectl {' '.join(command)}\n{job.cluster.kubectl(*command)}")
        except ClusterError as error:
            outputs.append(str(error))
    return "\n".join(outputs)
