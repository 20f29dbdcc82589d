"""Try a change of the operator on the cluster: run it from the sources, or roll out its rebuilt image.

``make operator-local`` and ``make operator-reload`` call this.
"""

from __future__ import annotations

import argparse
import getpass
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from lab.cluster import Cluster, ClusterError, wait_for
from lab.install import OPERATOR_NAMESPACE, install, this_cluster

DEPLOYMENT = "heterotrain-operator"
POD_SELECTOR = "app.kubernetes.io/name=heterotrain-operator,pod-template-hash"
PROMETHEUS_PATH = "/api/v1/namespaces/monitoring/services/prometheus:http/proxy"
HEALTH_PORT, METRICS_PORT = 18080, 19090
"""Ports of the local operator on the loopback address; the usual ones are often taken on a developer's machine."""


def main() -> int:
    """Run one command; on an error print it and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the operator from the sources until Ctrl-C; takes the operator's options")
    commands.add_parser("roll-out", help="install the chart of the sources and restart the operator")
    arguments, options = parser.parse_known_args()
    try:
        cluster = this_cluster(OPERATOR_NAMESPACE)
        if arguments.command == "run":
            return run(cluster, options)
        say("install the chart and restart the operator")
        install(cluster)
        say("the operator is ready")
    except ClusterError as error:
        print(f"own_operator: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(cluster: Cluster, options: Sequence[str]) -> int:
    """Run the operator from the sources in place of the installed one, and return its exit code.

    The installed Deployment has no replicas meanwhile. It gets them back at the end in any case. Both operators
    use the same Lease, so they never act at the same time.

    Args:
        cluster: a cluster whose namespace is the operator's.
        options: further options of ``heterotrain-operator run``.

    Raises:
        ClusterError: a command against the cluster failed.
    """
    deployment = cluster.get("deployment", DEPLOYMENT)
    if deployment is None:
        say("the operator is not installed yet: install Prometheus and the chart")
        install(cluster)
        deployment = cluster.get("deployment", DEPLOYMENT)
    replicas = replicas_to_restore(deployment)
    try:
        say(f"scale {DEPLOYMENT} down to 0; Ctrl-C scales it up to {replicas} again")
        scale(cluster, 0)
        wait_for(lambda: not cluster.list("pods", POD_SELECTOR), "the end of the installed operator", timeout_s=60)
        with prometheus(cluster) as prometheus_url:
            say(f"operator from the sources; its metrics: http://127.0.0.1:{METRICS_PORT}/metrics")
            return supervise(command(cluster, prometheus_url, options), cluster.environment)
    finally:
        say(f"scale {DEPLOYMENT} up to {replicas}")
        with ignored_signals():
            scale(cluster, replicas)


def replicas_to_restore(deployment: Mapping[str, Any] | None) -> int:
    """Return the replicas of a Deployment, but at least 1: a killed run may have left 0 behind."""
    return max(1, int((deployment or {}).get("spec", {}).get("replicas", 1)))


def scale(cluster: Cluster, replicas: int) -> None:
    """Set the number of replicas of the installed operator."""
    cluster.kubectl("scale", f"deployment/{DEPLOYMENT}", f"--replicas={replicas}")


def command(cluster: Cluster, prometheus_url: str, options: Sequence[str]) -> list[str]:
    """Return the command line of the local operator."""
    return [
        sys.executable, "-m", "heterotrain_operator", "run",
        "--kubeconfig", cluster.environment["KUBECONFIG"],
        "--namespace", OPERATOR_NAMESPACE,
        "--lease-name", DEPLOYMENT,
        "--identity", f"local-{getpass.getuser()}",
        "--listen", "127.0.0.1",
        "--health-port", str(HEALTH_PORT),
        "--metrics-port", str(METRICS_PORT),
        "--prometheus-url", prometheus_url,
        "--log-format", "text",
        *options,
    ]  # fmt: skip


@contextmanager
def prometheus(cluster: Cluster) -> Iterator[str]:
    """Yield the URL of the cluster's Prometheus for this machine, through the API server.

    Raises:
        ClusterError: `kubectl proxy` does not start.
    """
    proxy = subprocess.Popen(
        ["kubectl", "proxy", "--port=0"],
        env=dict(cluster.environment),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends the operator first
    )
    try:
        line = proxy.stdout.readline() if proxy.stdout else ""
        port = line.strip().rpartition(":")[2]
        if not port.isdecimal():
            raise ClusterError(f"`kubectl proxy` did not start: {line.strip() or 'it printed nothing'}")
        yield f"http://127.0.0.1:{port}{PROMETHEUS_PATH}"
    finally:
        proxy.terminate()
        proxy.wait()


def supervise(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program until it ends or a signal asks for its end, and return its exit code.

    The program has a session of its own, so that one Ctrl-C reaches it as exactly one SIGTERM: it then releases the
    Lease. A second Ctrl-C kills it.
    """
    process = subprocess.Popen(arguments, env=dict(environment), start_new_session=True)
    signals_seen = 0

    def stop(_number: int, _frame: object) -> None:
        nonlocal signals_seen
        signals_seen += 1
        with suppress(ProcessLookupError):
            process.terminate() if signals_seen == 1 else process.kill()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0 if signals_seen else code


@contextmanager
def ignored_signals() -> Iterator[None]:
    """Ignore further Ctrl-C, which would leave the cluster without an operator."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Print one line of progress at once."""
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
