"""A control plane without nodes, on loopback: the real etcd, API server, controller manager and scheduler.

It serves measurements with thousands of nodes and pods in which no program runs. There, KWOK simulates every node's
kubelet by rules of the caller. It also serves tests with controllers whose webhooks must not meet other tests' pods:
programs on this machine can be webhooks, behind a Service of type ExternalName. It does not need root, and it can run
next to a cluster of ``kind-config.yaml``.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local_cluster import paths, pki, services
from local_cluster.process import Problem, run, say, wait_until
from local_cluster.topology import Node, Topology

LOOPBACK = "127.0.0.1"
GRACE_S = 400
"""Time without a renewed Lease after which a node is lost; a Lease lasts half of it, five times as long as usual.

Real nodes renew theirs more often, which would only cost time here.
"""


@dataclass(slots=True)
class ControlPlane:
    """The running control plane.

    Attributes:
        folder: of certificates, data and logs.
        commands: by name, the command line of each program.
        processes: by name, those that run.
    """

    folder: Path
    commands: dict[str, list[str]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "pki/admin.kubeconfig"

    def start(self, name: str) -> None:
        """Start a program; its output goes to its log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.commands[name], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder
            )

    def stop(self, name: str, *, by: signal.Signals = signal.SIGTERM) -> None:
        """End a program; kill it if it has not ended 20 s after the signal."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.send_signal(by)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl prints, as the administrator.

        Raises:
            Problem: it failed.
        """
        return run(paths.programs() / "kubectl", "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin)

    def wait_ready(self) -> None:
        """Return as soon as the API server is ready.

        Raises:
            Problem: it ended, or is not ready within three minutes.
        """

        def ready() -> bool:
            process = self.processes["kube-apiserver"]
            if process.poll() is not None:
                raise Problem(f"the API server ended: {self.folder}/kube-apiserver.log says why")
            try:
                return self.kubectl("get", "--raw", "/readyz", "--request-timeout=2s") == "ok"
            except Problem:
                return False

        wait_until(ready, "the API server", timeout_s=180)


@contextmanager
def control_plane(folder: Path, *, stages: Path | None) -> Iterator[ControlPlane]:
    """Run a control plane in an empty folder; nothing of it runs afterwards.

    Args:
        folder: for certificates, data and logs.
        stages: KWOK's rules for nodes and pods; ``None`` for no KWOK, where the caller acts as the kubelets.

    Raises:
        Problem: a program is missing or does not start.
    """
    etcd, peer, api, simulator = (free_port() for _ in range(4))
    plan = _topology(api)
    pki.issue(folder / "pki", plan)
    commands = services.control_plane(plan.control_plane, plan, programs=paths.programs(), pki=folder / "pki")
    clients, peers = f"http://{LOOPBACK}:{etcd}", f"http://{LOOPBACK}:{peer}"
    flags: dict[str, dict[str, object]] = {
        "etcd": {
            "data-dir": folder / "etcd", "listen-client-urls": clients, "advertise-client-urls": clients,
            "listen-peer-urls": peers, "initial-advertise-peer-urls": peers, "initial-cluster": f"default={peers}",
        },
        "kube-apiserver": {
            "bind-address": LOOPBACK, "secure-port": api, "etcd-servers": clients, "cert-dir": folder / "serving",
            # Without pods, a webhook is at the address of its Service.
            "enable-aggregator-routing": "false",
        },
        "kube-controller-manager": {"secure-port": 0, "node-monitor-grace-period": f"{GRACE_S}s"},
        "kube-scheduler": {"secure-port": 0},
    }  # fmt: skip
    plane = ControlPlane(folder, {name: _with(command, flags[name]) for name, command in commands.items()})
    if stages is not None:
        plane.commands["kwok"] = [
            f"{paths.programs()}/kwok", f"--kubeconfig={plane.kubeconfig}", f"--config={stages}",
            "--manage-all-nodes=true", f"--node-lease-duration-seconds={GRACE_S // 2}", "--cidr=10.128.0.0/9",
            f"--server-address={LOOPBACK}:{simulator}",
        ]  # fmt: skip
    try:
        for name in ("etcd", "kube-apiserver"):
            plane.start(name)
        plane.wait_ready()
        for name in ("kube-controller-manager", "kube-scheduler", *(["kwok"] if stages else [])):
            plane.start(name)
        say(f"    control plane: export KUBECONFIG={plane.kubeconfig}")
        yield plane
    finally:
        for name in reversed([*plane.processes]):
            plane.stop(name)


def _with(command: list[str], flags: dict[str, object]) -> list[str]:
    """Return the command with these flags instead of its own of the same names."""
    own = [word for word in command if word.partition("=")[0].removeprefix("--") not in flags]
    return [*own, *(f"--{name}={value}" for name, value in flags.items())]


def _topology(api_port: int) -> Topology:
    node = Node(
        name="control-plane",
        index=0,
        is_control_plane=True,
        address=LOOPBACK,
        pod_cidr="10.127.0.0/24",
        labels={},
        taints=(),
        mounts=(),
    )
    return Topology(
        name="simulated",
        gateway=LOOPBACK,
        pod_subnet="10.128.0.0/9",
        service_subnet="10.96.0.0/16",
        nodes=(node,),
        kubelet={},
        api_port=api_port,
    )


def free_port() -> int:
    """Return an unused port on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
