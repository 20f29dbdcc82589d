"""A real API server, a namespace for each test, and one operator as a process for all that leave it running.

``KUBECONFIG`` selects the cluster (``make cluster`` and ``eval "$(python -m local_cluster env)"``). Without it, the
tests are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from heterotrain_operator.api.crd import crd
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from support.api_cluster import (
    CRDS,
    Cluster,
    Operator,
    new_namespace,
    own_namespace,
    remove_namespace,
    restore_installed_operators,
    served,
    signs_of_life,
    silence_installed_operators,
)
from support.machine_locks import definition_of_jobs
from support.waiting import until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here as integration tests."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(3600))


LOCK = Path(tempfile.gettempdir(), "heterotrain-integration.lock")
NO_CLUSTER = 'no cluster: run `make cluster`, then eval "$(PYTHONPATH=deploy/dev/cluster python -m local_cluster env)"'


@pytest.fixture(autouse=True)
def _definition_of_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test that changes the definition of jobs run while no other process runs one."""
    with definition_of_jobs(alone=request.node.get_closest_marker("changes_definition") is not None):
        yield


@pytest.fixture(scope="session")
def quiet_cluster() -> Iterator[None]:
    """A cluster with the CRD and without another operator while the tests run."""
    if not os.environ.get("KUBECONFIG"):
        # Only a manual pytest run comes here: `make test` has a cluster and allows no skips.
        pytest.skip(reason=NO_CLUSTER)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        asyncio.run(_prepare())
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)
        with suppress(BlockingIOError):  # other processes run these tests, too: the last one restores
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            asyncio.run(_restore())


async def _prepare() -> None:
    async with a_client() as client:
        await client.apply(CRDS, {**crd(), "metadata": {**crd()["metadata"], "namespace": ""}})
        await until(lambda: served(client), "the CRD is served")
        await silence_installed_operators(client)


async def _restore() -> None:
    async with a_client() as client:
        await restore_installed_operators(client)


@asynccontextmanager
async def a_client() -> AsyncIterator[KubeClient]:
    """Yield a client of the event loop that runs now."""
    client = KubeClient(await load_configuration())
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def kube(quiet_cluster: None) -> AsyncIterator[KubeClient]:
    """A client of the real API server."""
    async with a_client() as client:
        yield client


@dataclass(slots=True)
class Shared:
    """The operator of all tests, and a namespace for each of them that no test has used yet."""

    operator: Operator
    log: Path
    unused: list[str]


@pytest.fixture(scope="session")
def shared(
    quiet_cluster: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """An operator that watches a namespace for each test: its start takes longer than most tests."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    tests = [each for each in request.session.items if uses_shared(each)]

    async def start() -> tuple[str, Shared]:
        async with a_client() as kube:
            home, *unused = [await new_namespace(kube) for _ in (None, *tests)]
        operator = Operator(home, log, watched=unused)
        await operator.start()
        return home, Shared(operator, log, unused)

    async def stop() -> None:
        await found.operator.stop()
        async with a_client() as kube:
            for name in (home, *found.unused):
                await remove_namespace(kube, name)

    home, found = asyncio.run(start())
    yield found
    asyncio.run(stop())


def uses_shared(item: pytest.Item) -> bool:
    """Return whether a test uses the operator of all tests."""
    return "operator" in getattr(item, "fixturenames", ())


@pytest.fixture
async def namespace(kube: KubeClient, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The test's own namespace; the operator of all tests watches it if the test uses that operator."""
    if not uses_shared(request.node):
        async with own_namespace(kube) as name:
            yield name
        return
    name = request.getfixturevalue("shared").unused.pop()
    yield name
    await remove_namespace(kube, name)


@pytest.fixture(scope="session")
def nodes(quiet_cluster: None) -> Iterator[dict[str, str]]:
    """The nodes of all tests, which show signs of life."""
    with signs_of_life() as found:
        yield found


@pytest.fixture
async def cluster(kube: KubeClient, namespace: str, nodes: dict[str, str]) -> AsyncIterator[Cluster]:
    """The test's namespace and nodes."""
    found = Cluster(kube, namespace, nodes)
    yield found
    await found.remove_nodes()


@pytest.fixture
async def operator(shared: Shared) -> AsyncIterator[Operator]:
    """The running operator of all tests, which they must leave running."""
    before = shared.log.stat().st_size
    if not await shared.operator.leads():  # the test before has failed by that
        await shared.operator.start()
    yield shared.operator
    print(shared.log.read_bytes()[before:].decode())
    assert await shared.operator.leads(), "the operator goes on after a test"


@pytest.fixture
async def own_operator(namespace: str, tmp_path: Path) -> AsyncIterator[Operator]:
    """A running operator that the test may stop."""
    found = Operator(namespace, tmp_path / "operator.log")
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
        print((tmp_path / "operator.log").read_text())
