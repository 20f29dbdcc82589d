"""Both images run under a user that they don't know, as on OpenShift, and they hold the wheel that users install."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from heterotrain_core.version import __version__
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.install import OPERATOR_NAMESPACE, PROMETHEUS_URL

if TYPE_CHECKING:
    from conftest import Start

UID = 1_000_660_000
METADATA = "import getpass, importlib.metadata as m; print(m.version('heterotrain'), getpass.getuser())"


@pytest.mark.thorough
def test_a_job_trains_under_any_user(start: Start) -> None:
    running = start(epochs=None, uid=UID)
    running.wait_steps(1)
    pod = running.job.pods()[0]["metadata"]["name"]
    written = running.job.cluster.kubectl("exec", pod, "--", "python", "-c", METADATA)
    assert written.split() == [__version__, "heterotrain"]
    running.stop()
    assert {each.stat().st_uid for each in (running.folder / "samples").iterdir()} == {UID}


@pytest.mark.thorough
def test_the_operator_reads_the_cluster_under_any_user(installed: Cluster) -> None:
    """The pod of `helm test` needs the client of the API server, the Lease and Prometheus."""
    cluster = Cluster(environment=installed.environment, namespace=OPERATOR_NAMESPACE)
    chart = str(REPOSITORY / "helm/heterotrain")
    settings = (
        "image.tag=dev", f"prometheus.url={PROMETHEUS_URL}",
        f"podSecurityContext.runAsUser={UID}", "podSecurityContext.runAsGroup=0",
    )  # fmt: skip
    command = ("helm", "template", "heterotrain", chart, "--namespace", OPERATOR_NAMESPACE, "--kube-version", "1.36.0")
    values = [word for each in settings for word in ("--set", each)]
    text = cluster.run(*command, "--show-only", "templates/tests/api.yaml", *values)
    pod = yaml.safe_load(text)
    pod["metadata"] = {"name": "any-user"}
    cluster.delete("pod", "any-user", "--grace-period=0")
    cluster.apply(pod)
    try:
        phase = wait_for(lambda: ended(cluster, "any-user"), "the check to end", timeout_s=180)
        assert phase == "Succeeded", cluster.kubectl("logs", "any-user")
    finally:
        cluster.delete("pod", "any-user", "--grace-period=0")


def ended(cluster: Cluster, pod: str) -> str | None:
    """Return the pod's phase once it has ended."""
    phase = (cluster.get("pod", pod) or {}).get("status", {}).get("phase")
    return phase if phase in ("Succeeded", "Failed") else None
