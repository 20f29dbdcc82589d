"""A cluster with a namespace, the definition of jobs and those of the Prometheus operator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import yaml
from heterotrain_operator.api.crd import crd
from lab.cluster import Cluster
from local_cluster import paths, toolchain
from support.machine_locks import definition_of_jobs, machine_lock

NAMESPACE = "chart-objects"
OTHER_NAMESPACE = "training"  # of one object of docs/install.md
MONITORS = ("podmonitors", "servicemonitors", "prometheusrules")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The cluster with a namespace, the definition of jobs and those of the Prometheus operator.

    One process at a time has these, because their names are the same in all. It must give them back before it runs
    other tests, which a fixture of a package would not: without ``__init__.py``, that is one of the session.
    """
    if not os.environ.get("KUBECONFIG"):
        pytest.skip(reason="no cluster: KUBECONFIG names none")
    with machine_lock("chart"), definition_of_jobs():
        yield from _prepared()


def _prepared() -> Iterator[Cluster]:
    found = Cluster(namespace=NAMESPACE)
    definitions = toolchain.module_folder(
        "github.com/prometheus-operator/prometheus-operator", required_by=paths.LOCAL / "kubeconform"
    )
    files = [definitions / f"example/prometheus-operator-crd/monitoring.coreos.com_{each}.yaml" for each in MONITORS]
    monitors = [f"{each}.monitoring.coreos.com" for each in MONITORS]
    try:
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            found.run("kubectl", "delete", "namespace", "--ignore-not-found", namespace)  # of a run that was ended
            found.run("kubectl", "create", "namespace", namespace)
        found.run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(crd()))
        for path in files:
            found.run("kubectl", "apply", "--server-side", "-f", str(path))
        found.run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd", crd()["metadata"]["name"])
        found.run("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd", *monitors)
        yield found
    finally:
        found.run("kubectl", "delete", "crd", "--ignore-not-found", *monitors)
        found.run("kubectl", "delete", "namespace", "--ignore-not-found", NAMESPACE, OTHER_NAMESPACE)
