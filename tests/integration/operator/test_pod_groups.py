"""A job's PodGroup on a real API server, with a definition of PodGroups that this test writes itself.

No scheduler with groups runs here: what the operator writes is checked, and that the API server takes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import KubeError, NotFound
from heterotrain_operator.kube.resources import Resource
from support.api_cluster import CRDS, Cluster, Operator
from support.waiting import until

GROUPS = Resource("scheduling.volcano.sh/v1beta1", "podgroups")
SPEC = {
    "type": "object",
    "properties": {"minMember": {"type": "integer"}, "queue": {"type": "string"}},
}
DEFINITION = {
    "apiVersion": CRDS.api_version,
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podgroups.scheduling.volcano.sh", "namespace": ""},
    "spec": {
        "group": "scheduling.volcano.sh",
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": SPEC}}},
            }
        ],
    },
}


@pytest.fixture
async def defined_later(kube: KubeClient) -> AsyncIterator[None]:
    """Remove the definition, which the test installs, in the end; skip where Volcano itself is installed."""
    try:
        await kube.get(CRDS, None, DEFINITION["metadata"]["name"])  # type: ignore[index]  # a body is untyped
    except NotFound:
        pass
    else:
        pytest.skip(reason="this cluster has PodGroups of its own, and the test removes its definition")
    yield
    found = await kube.get(CRDS, None, DEFINITION["metadata"]["name"])  # type: ignore[index]  # a body is untyped
    await kube.delete(CRDS, "", found["metadata"]["name"], uid=found["metadata"]["uid"])


@pytest.mark.usefixtures("defined_later")
async def test_a_group_is_reported_missing_then_made_changed_and_deleted(cluster: Cluster, operator: Operator) -> None:
    """A missing definition is one sentence; once it is installed, the group follows the job."""
    group = {"scheduler": "Volcano", "queue": "research"}
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=3), podGroup=group))

    async def reported() -> bool:
        return "the cluster has no PodGroups of scheduling.volcano.sh" in (await cluster.condition("Ready"))[2]

    await until(reported, "the missing definition is reported")
    await cluster.kube.apply(CRDS, DEFINITION)
    await cluster.edit({"backoffLimit": 5})  # a changed spec is tried at once

    async def least() -> int:
        try:
            found = await cluster.kube.get(GROUPS, cluster.namespace, "job-workers")
        except KubeError:
            return 0
        assert found["spec"]["queue"] == "research"
        return int(found["spec"]["minMember"])

    async def is_least(number: int) -> bool:
        return await least() == number

    await until(lambda: is_least(1), "the group")
    pod = next(iter((await cluster.pods()).values()))
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "job-workers"
    await cluster.edit({"elasticPolicy": {"minReplicas": 2}})
    await until(lambda: is_least(2), "the group's new minimum")
    await cluster.edit({"suspend": True})
    await until(lambda: is_least(0), "the group is gone")
