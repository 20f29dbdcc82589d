"""A real API server, a namespace for each test, and the operator as a process.

``KUBECONFIG`` selects the cluster (``make cluster`` and ``eval "$(python -m local_cluster env)"``). Without it, the
tests are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from heterotrain_operator.api.crd import crd
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import (
    CRDS,
    Cluster,
    Operator,
    own_namespace,
    scale,
    served,
    silence_installed_operators,
)
from support.waiting import until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as integration tests."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(600))


NO_CLUSTER = 'no cluster: run `make cluster`, then eval "$(PYTHONPATH=deploy/dev/cluster python -m local_cluster env)"'


@pytest.fixture(scope="session")
def quiet_cluster() -> Iterator[None]:
    """A cluster with the CRD and without another operator while the tests run."""
    if not os.environ.get("KUBECONFIG"):
        # Only a manual pytest run comes here: `make test` has a cluster and allows no skips.
        pytest.skip(reason=NO_CLUSTER)
    silenced = asyncio.run(_prepare())
    yield
    asyncio.run(_restore(silenced))


async def _prepare() -> list[Body]:
    client = KubeClient(await load_configuration())
    try:
        await client.apply(CRDS, {**crd(), "metadata": {**crd()["metadata"], "namespace": ""}})
        await until(lambda: served(client), "the CRD is served")
        return await silence_installed_operators(client)
    finally:
        await client.close()


async def _restore(silenced: list[Body]) -> None:
    client = KubeClient(await load_configuration())
    for deployment in silenced:
        await scale(client, deployment, deployment["spec"]["replicas"])
    await client.close()


@pytest.fixture
async def kube(quiet_cluster: None) -> AsyncIterator[KubeClient]:
    """A client of the real API server."""
    client = KubeClient(await load_configuration())
    yield client
    await client.close()


@pytest.fixture
async def namespace(kube: KubeClient) -> AsyncIterator[str]:
    """The test's own namespace."""
    async with own_namespace(kube) as name:
        yield name


@pytest.fixture
async def cluster(kube: KubeClient, namespace: str) -> AsyncIterator[Cluster]:
    """The test's namespace and nodes."""
    found = Cluster(kube, namespace)
    renewing = asyncio.create_task(found.renew_leases())
    try:
        yield found
    finally:
        renewing.cancel()
        await found.remove_nodes()


@pytest.fixture
async def operator(namespace: str, tmp_path: Path) -> AsyncIterator[Operator]:
    """The running operator."""
    found = Operator(namespace, tmp_path / "operator.log")
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
        print((tmp_path / "operator.log").read_text())
