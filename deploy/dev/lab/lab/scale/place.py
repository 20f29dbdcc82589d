"""Control plane and operators as processes, their processor time and memory, and the operator's metrics."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from local_cluster import paths, toolchain
from local_cluster.bare import LOOPBACK, ControlPlane, control_plane, free_port
from local_cluster.process import Problem, run, wait_until

from lab.cluster import REPOSITORY
from lab.install import OPERATOR_NAMESPACE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ACCOUNT = "heterotrain-operator"


@dataclass(slots=True)
class Replica:
    """One operator process: the real entry point, with the chart's rights.

    Attributes:
        prometheus_url: where it reads telemetry.
    """

    identity: str
    kubeconfig: Path
    log: Path
    prometheus_url: str
    process: subprocess.Popen[bytes] | None = None
    metrics_port: int = 0
    health_port: int = 0

    def start(self) -> None:
        """Start it."""
        self.metrics_port, self.health_port = free_port(), free_port()
        command = [
            sys.executable, "-m", "heterotrain_operator", "run",
            "--namespace", OPERATOR_NAMESPACE, "--identity", self.identity,
            "--kubeconfig", str(self.kubeconfig), "--listen", LOOPBACK, "--health-port", str(self.health_port),
            "--metrics-port", str(self.metrics_port), "--prometheus-url", self.prometheus_url,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def end(self, by: signal.Signals) -> None:
        """Send it a signal; after SIGKILL, wait for its end."""
        if self.process is not None:
            self.process.send_signal(by)
            if by is signal.SIGKILL:
                self.process.wait()

    def metrics(self) -> dict[str, float]:
        """Return its metrics by name and labels; empty while it does not answer."""
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.metrics_port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
            return {name: float(value) for name, _, value in pairs}
        return {}

    @property
    def ready(self) -> bool:
        """Whether its readiness probe succeeds: it has read all objects. A rollout ends the leader only after that."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{LOOPBACK}:{self.health_port}/readyz", timeout=5) as answer,
        ):
            return bool(answer.status == 200)  # noqa: PLR2004  # OK
        return False

    @property
    def leads(self) -> bool:
        """Whether it leads, according to its own metric."""
        return self.metrics().get("heterotrain_operator_leader") == 1.0


@contextlib.contextmanager
def running(folder: Path) -> Iterator[ControlPlane]:
    """Run a control plane with the chart's CRD and rights; yield it.

    Raises:
        Problem: something did not start.
    """
    with control_plane(folder, stages=Path(__file__).with_name("stages.yaml")) as plane:
        plane.kubectl("create", "namespace", OPERATOR_NAMESPACE)
        chart = [
            str(paths.programs() / "helm"), "template", "heterotrain", str(REPOSITORY / "helm/heterotrain"),
            "--kube-version", toolchain.KUBERNETES_VERSION, "--namespace", OPERATOR_NAMESPACE,
            "--show-only", "templates/rbac.yaml", "--show-only", "templates/crd.yaml",
        ]  # fmt: skip
        plane.kubectl("apply", "--server-side", "--namespace", OPERATOR_NAMESPACE, "-f", "-", stdin=run(*chart))

        def served() -> bool:
            with contextlib.suppress(Problem):
                plane.kubectl("get", "htj", "--all-namespaces")
                return True
            return False

        wait_until(served, "the CRD", timeout_s=60)
        yield plane


@contextlib.contextmanager
def exporters(plane: ControlPlane) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run the stand-in for Prometheus; yield its URL and its process."""
    port = free_port()
    command = [
        sys.executable, "-m", "lab.scale.exporters", "--port", str(port),
        "--kubectl", str(paths.programs() / "kubectl"), "--kubeconfig", str(plane.kubeconfig),
    ]  # fmt: skip
    with (plane.folder / "exporters.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield f"http://{LOOPBACK}:{port}", process
    finally:
        process.terminate()
        process.wait()


def replica(plane: ControlPlane, identity: str, prometheus_url: str) -> Replica:
    """Return an operator with a token of the chart's service account, not yet started."""
    token = plane.kubectl("create", "token", ACCOUNT, "--namespace", OPERATOR_NAMESPACE, "--duration=2h").strip()
    path = plane.folder / f"{identity}.kubeconfig"
    path.write_bytes(plane.kubeconfig.read_bytes())
    own = ["config", f"--kubeconfig={path}"]
    plane.kubectl(*own, "set-credentials", "operator", f"--token={token}")
    plane.kubectl(*own, "set-context", "--current", "--user=operator")
    return Replica(
        identity=identity,
        kubeconfig=path,
        log=plane.folder / f"{identity}.log",
        prometheus_url=prometheus_url,
    )


def wait_leads(one: Replica, *, timeout_s: float = 60) -> float:
    """Return the seconds until a replica leads."""
    started_s = time.monotonic()
    wait_until(lambda: one.leads, f"{one.identity} to lead: {one.log}", timeout_s=timeout_s, every_s=0.2)
    return time.monotonic() - started_s


def cpu_s(pid: int) -> float:
    """Return the processor seconds used by a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def peak_mib(pid: int) -> float:
    """Return the peak resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def quantile(metrics: dict[str, float], name: str, q: float, *, labels: str = "") -> float:
    """Return a quantile of a histogram, linear within its bucket as in Prometheus; infinity beyond the last bucket.

    Args:
        metrics: by name with labels, as a scrape has them.
        name: the histogram's name.
        q: between 0 and 1.
        labels: those after ``le``, such as ``,priority="urgent"``.
    """
    prefix, suffix = f'{name}_bucket{{le="', f'"{labels}}}'
    counts = sorted(
        (float(label.removeprefix(prefix).removesuffix(suffix)), count)
        for label, count in metrics.items()
        if label.startswith(prefix) and label.endswith(suffix)
    )
    wanted, below, low_s = q * counts[-1][1], 0.0, 0.0
    for high_s, count in counts:
        if count >= wanted:
            return (
                low_s + (high_s - low_s) * (wanted - below) / max(1.0, count - below)
                if high_s < float("inf")
                else high_s
            )
        below, low_s = count, high_s
    return float("inf")
