"""The time that a changed ConfigMap takes to reach a pod that mounts it."""

from __future__ import annotations

import time

from heterotrain_core.contract import keys

from lab.cluster import Cluster, wait_for

_POD = "reader"
_WATCH = """
import pathlib, time
path, last = pathlib.Path("/plan/value"), None
while True:
    now = path.read_text()
    if now != last:
        print(now, time.time(), flush=True)
        last = now
    time.sleep(0.01)
"""


def measure_delivery(cluster: Cluster, *, touched: int, left: int) -> tuple[list[float], list[float]]:
    """Return the seconds from each write to its read: with a touched annotation of the pod, and without one."""
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "delivery"}, "data": {"value": "start"}},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": _POD},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "nodeSelector": {keys.LABEL_POOL: "a100"},
                "containers": [
                    {
                        "name": "reader",
                        "image": "heterotrain/trainer:dev",
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python", "-c", _WATCH],
                        "volumeMounts": [{"name": "plan", "mountPath": "/plan"}],
                    }
                ],
                "volumes": [{"name": "plan", "configMap": {"name": "delivery"}}],
            },
        },
    )
    wait_for(lambda: "start" in _read_times(cluster), "the reading pod to start", timeout_s=60)
    with_touch = [_once(cluster, f"touched-{i}", touch=True) for i in range(touched)]
    without = [_once(cluster, f"left-{i}", touch=False) for i in range(left)]
    cluster.delete("pod", _POD)
    return with_touch, without


def _once(cluster: Cluster, value: str, *, touch: bool) -> float:
    """Write a value, with ``touch`` also the pod's annotation, and return the seconds until the pod read it."""
    written_s = time.time()
    cluster.kubectl("patch", "configmap", "delivery", "--type=merge", "-p", f'{{"data":{{"value":"{value}"}}}}')
    if touch:
        cluster.kubectl("annotate", "pod", _POD, "--overwrite", f"{keys.ANNOTATION_PLAN}={value}")
    read_s = wait_for(lambda: _read_times(cluster).get(value), f"the pod to read {value}", timeout_s=150)
    return read_s - written_s


def _read_times(cluster: Cluster) -> dict[str, float]:
    lines = (line.split() for line in cluster.kubectl("logs", _POD).splitlines())
    return {value: float(at_s) for value, at_s in lines}
