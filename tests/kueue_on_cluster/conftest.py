"""The cluster of `make cluster` with the operator, and Kueue for the pods of one namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster import Cluster
from lab.install import install, this_cluster
from local_cluster import toolchain
from support.kueue_on_cluster import kueue_on
from support.on_cluster import remove_namespace

SETUP_S = 1800
NAMESPACE = "e2e-kueue"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time to compile Kueue."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(SETUP_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, with the tests' own namespace, in which Kueue gates pods."""
    toolchain.build_programs(toolchain.KUEUE)
    found = this_cluster(NAMESPACE)
    install(found)
    remove_namespace(found)
    found.run("kubectl", "create", "namespace", NAMESPACE)
    try:
        with kueue_on(found):
            yield found
            remove_namespace(found)  # while Kueue still runs, which removes its finalizers from pods
    finally:
        remove_namespace(found)
