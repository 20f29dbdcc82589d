"""A control plane of its own with the real coscheduling plugin, a namespace for each test, and the operator.

The tests act as the kubelets, as the integration tests do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from heterotrain_operator.api.crd import crd
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from local_cluster import toolchain
from local_cluster.bare import ControlPlane, control_plane
from support.api_cluster import CRDS, Cluster, Operator, own_namespace, served
from support.coscheduling import coscheduling
from support.waiting import until

SETUP_S, TEST_S = 1800, 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test time to compile the scheduler, and the others time on a busy machine."""
    here = Path(__file__).parent
    for number, item in enumerate(item for item in items if here in item.path.parents):
        item.add_marker(pytest.mark.timeout(TEST_S if number else SETUP_S))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a second scheduler, which has the plugin."""
    toolchain.build_programs(toolchain.COSCHEDULING)
    folder = tmp_path_factory.mktemp("coscheduling")
    with control_plane(folder, stages=None) as found, coscheduling(found):
        yield found


@pytest.fixture
async def kube(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """A client of that control plane, with the definition of jobs."""
    client = KubeClient(await load_configuration(str(plane.kubeconfig)))
    await client.apply(CRDS, {**crd(), "metadata": {**crd()["metadata"], "namespace": ""}})
    await until(lambda: served(client), "the CRD is served")
    yield client
    await client.close()


@pytest.fixture
async def cluster(kube: KubeClient) -> AsyncIterator[Cluster]:
    """The test's namespace and nodes."""
    async with own_namespace(kube) as name:
        found = Cluster(kube, name)
        yield found
        await found.remove_nodes()


@pytest.fixture
async def operator(plane: ControlPlane, cluster: Cluster, tmp_path: Path) -> AsyncIterator[Operator]:
    """The running operator."""
    log = tmp_path / "operator.log"
    found = Operator(cluster.namespace, log, f"--kubeconfig={plane.kubeconfig}")
    await found.start()
    yield found
    await found.stop()
    print(log.read_text())
