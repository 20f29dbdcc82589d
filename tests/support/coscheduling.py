"""The real coscheduling plugin in a scheduler of its own, and the controller of its PodGroups, as processes.

The definition of PodGroups is that of the plugin's own module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from heterotrain_operator.kube.resources import Resource
from local_cluster import paths, toolchain
from local_cluster.bare import ControlPlane
from local_cluster.process import Problem, wait_until

GROUPS = Resource("scheduling.x-k8s.io/v1alpha1", "podgroups")
SCHEDULER = "scheduler-plugins-scheduler"
"""Name that the project's chart gives its scheduler."""
MODULE = "sigs.k8s.io/scheduler-plugins"


@contextmanager
def coscheduling(plane: ControlPlane) -> Iterator[None]:
    """Run scheduler and controller; the scheduler places pods when this begins.

    Raises:
        Problem: one of them does not start.
    """
    definition = (
        toolchain.module_folder(MODULE, required_by=toolchain.COSCHEDULING.module)
        / "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"
    )
    plane.kubectl("apply", "--server-side", "-f", str(definition))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=180s", "-f", str(definition))
    configuration = plane.folder / "coscheduling.yaml"
    configuration.write_text(yaml.safe_dump(_configuration(str(plane.kubeconfig))))
    program = f"{paths.programs()}/coscheduling"
    plane.commands["coscheduling"] = [program, f"--config={configuration}", "--secure-port=0"]
    plane.commands["coscheduling-controller"] = [
        program, "controller", f"--kubeconfig={plane.kubeconfig}", "--metricsAddr=0", "--probeAddr=0",
    ]  # fmt: skip
    names = ("coscheduling", "coscheduling-controller")
    for name in names:
        plane.start(name)
    try:
        wait_until(lambda: _schedules(plane, names), "the coscheduling plugin's scheduler", timeout_s=180)
        yield
    finally:
        for name in names:
            plane.stop(name)


def _configuration(kubeconfig: str) -> dict[str, Any]:
    only = {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]}  # one plugin orders the queue
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": kubeconfig},
        "profiles": [
            {
                "schedulerName": SCHEDULER,
                "plugins": {"multiPoint": {"enabled": [{"name": "Coscheduling"}]}, "queueSort": only},
                "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
            }
        ],
    }


def _schedules(plane: ControlPlane, names: tuple[str, ...]) -> bool:
    """Return whether the scheduler has looked at a pod that no node can take.

    Raises:
        Problem: a program has ended.
    """
    for name in names:
        if plane.processes[name].poll() is not None:
            raise Problem(f"{name} has ended: {(plane.folder / f'{name}.log').read_text()[-1500:]}")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "coscheduling-probe", "namespace": "default"},
        "spec": {
            "schedulerName": SCHEDULER,
            "nodeSelector": {"none": "none"},
            "containers": [{"name": "main", "image": "image.invalid/none:1"}],
        },
    }
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod))
    found = yaml.safe_load(plane.kubectl("get", "pod", "coscheduling-probe", "-o", "yaml"))
    seen = bool((found.get("status") or {}).get("conditions"))
    if seen:
        plane.kubectl("delete", "pod", "coscheduling-probe", "--force", "--grace-period=0")
    return seen
