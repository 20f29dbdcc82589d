"""Install Prometheus and the operator on a cluster, by the steps of the README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from heterotrain_core.contract import keys

from lab.cluster import REPOSITORY, Cluster, ClusterError, commands, wait_for

OPERATOR_NAMESPACE = "heterotrain-system"
PROMETHEUS_URL = "http://prometheus.monitoring.svc:9090"
PROMETHEUS_MANIFEST = REPOSITORY / "deploy/monitoring/prometheus.yaml"
LOCAL_PROMETHEUS_IMAGE = "heterotrain/prometheus:local"
"""The same version of Prometheus, under the name by which the cluster's own launcher loads it into the nodes."""


def this_cluster(namespace: str = "default") -> Cluster:
    """Return the cluster that `make cluster` started.

    Raises:
        ClusterError: no cluster is running.
    """
    done = subprocess.run(
        [sys.executable, "-m", "local_cluster", "env"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "deploy/dev/cluster")},
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"no cluster is running: `make cluster` starts one ({done.stderr.strip()})")
    environment = dict(os.environ)
    for line in done.stdout.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        if name:
            environment[name] = os.path.expandvars(shlex.split(value)[0] if value else "")
    return Cluster(environment=environment, namespace=namespace)


def install(cluster: Cluster) -> None:
    """Install Prometheus and the operator's chart and wait until both are ready; safe to repeat."""
    chart = str(REPOSITORY / "helm/heterotrain")
    _adopt_definition(cluster)
    cluster.run("kubectl", "apply", "-f", "-", stdin=local_prometheus(PROMETHEUS_MANIFEST.read_text()))
    commands(
        cluster,
        [
            "helm", "upgrade", "--install", "heterotrain", chart,
            "--namespace", OPERATOR_NAMESPACE, "--create-namespace",
            "--set", f"prometheus.url={PROMETHEUS_URL}", "--set", "image.tag=dev",
            "--values", str(REPOSITORY / "deploy/dev/lab/values.yaml"),
        ],
    )  # fmt: skip
    # A rebuilt image has the same tag, so only a restart deploys it.
    cluster.run("kubectl", "-n", OPERATOR_NAMESPACE, "rollout", "restart", "deployment/heterotrain-operator")
    for namespace, name in (("monitoring", "prometheus"), (OPERATOR_NAMESPACE, "heterotrain-operator")):
        rollout(cluster, namespace, name)


def local_prometheus(manifest: str) -> str:
    """Return the manifest with the image that the cluster's nodes hold, because they may reach no image registry.

    Raises:
        ClusterError: the manifest does not name exactly one image.
    """
    local, images = re.subn(r"(?m)^(\s*image:) .+$", rf"\1 {LOCAL_PROMETHEUS_IMAGE}", manifest)
    if images != 1:
        raise ClusterError(f"{PROMETHEUS_MANIFEST} names {images} images, but must name 1")
    return local


def _adopt_definition(cluster: Cluster) -> None:
    """Mark a CRD that was applied without Helm, as tests do, as Helm's own; otherwise Helm refuses to install."""
    name = f"customresourcedefinition/{keys.PLURAL}.{keys.GROUP}"
    if cluster.run("kubectl", "get", name, "--ignore-not-found", "-o", "name").strip():
        cluster.run("kubectl", "label", name, "--overwrite", "app.kubernetes.io/managed-by=Helm")
        release = ["meta.helm.sh/release-name=heterotrain", f"meta.helm.sh/release-namespace={OPERATOR_NAMESPACE}"]
        cluster.run("kubectl", "annotate", name, "--overwrite", *release)


def rollout(cluster: Cluster, namespace: str, name: str) -> None:
    """Wait until a Deployment has completed its rollout."""

    def is_ready() -> bool:
        status = cluster.run("kubectl", "-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=5s")
        return "successfully" in status

    wait_for(is_ready, f"deployment {namespace}/{name}", timeout_s=240)


if __name__ == "__main__":
    try:
        install(this_cluster())
    except ClusterError as error:
        sys.exit(f"install: {error}")
