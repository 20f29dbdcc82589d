"""The chart's roles and admission policies on a real API server, as the operator and as authors of jobs see them."""

from __future__ import annotations

import copy
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.api.crd import crd
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import build_network_policy
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Conflict, KubeError, Rejected
from heterotrain_operator.kube.resources import CONFIG_MAPS, JOBS, NETWORK_POLICIES, PODS, Resource
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import CRDS, Cluster, Operator, served
from support.helm import render
from support.waiting import until

pytestmark = pytest.mark.needs_program("helm")

RBAC, ADMISSION = "rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1"
INSTALLED = {
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "ClusterRole": Resource(RBAC, "clusterroles"),
    "ClusterRoleBinding": Resource(RBAC, "clusterrolebindings"),
    "Role": Resource(RBAC, "roles"),
    "RoleBinding": Resource(RBAC, "rolebindings"),
    "ValidatingAdmissionPolicy": Resource(ADMISSION, "validatingadmissionpolicies"),
    "ValidatingAdmissionPolicyBinding": Resource(ADMISSION, "validatingadmissionpolicybindings"),
}
As = Callable[[str], Awaitable[KubeClient]]


@pytest.fixture
async def as_user() -> AsyncIterator[As]:
    """Make clients that act as another user."""
    made: list[KubeClient] = []

    async def make(user: str) -> KubeClient:
        client = KubeClient(await load_configuration())
        client._client.set_default_header("Impersonate-User", user)
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def account(kube: KubeClient, namespace: str) -> AsyncIterator[str]:
    """Install the chart's rights and policies for an operator of the test's namespace; yield its user name."""
    objects: list[Body] = []
    release = f"rights-{secrets.token_hex(3)}"
    for body in render(f"watchNamespaces={{{namespace}}}", release=release, namespace=namespace):
        if body["kind"] in INSTALLED:
            wide = "Cluster" in body["kind"] or "Validating" in body["kind"]
            body["metadata"].setdefault("namespace", "" if wide else namespace)
            objects.append(body)
            await kube.apply(INSTALLED[body["kind"]], body)
    (name,) = [body["metadata"]["name"] for body in objects if body["kind"] == "ServiceAccount"]
    yield f"system:serviceaccount:{namespace}:{name}"
    for body in objects:
        resource, metadata = INSTALLED[body["kind"]], body["metadata"]
        with suppress(KubeError):
            found = await kube.get(resource, metadata["namespace"] or None, metadata["name"])
            await kube.delete(resource, metadata["namespace"], metadata["name"], uid=found["metadata"]["uid"])


async def refused(call: Callable[[], Awaitable[Any]], words: str) -> None:
    """Wait until a call is refused with these words: a policy takes effect some moments after it was written."""

    async def probe() -> bool:
        try:
            await call()
        except Rejected as error:
            return words in str(error)
        except Conflict:  # an earlier call made it, when the policy was not in force yet
            return False
        return False

    await until(probe, f"a refusal with {words!r}")


def config_map(namespace: str, *, labels: dict[str, str] | None = None) -> Body:
    metadata = {"name": f"c-{secrets.token_hex(3)}", "namespace": namespace, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


async def test_the_operator_writes_its_own_objects_only(
    kube: KubeClient, cluster: Cluster, account: str, as_user: As
) -> None:
    operator = await as_user(account)
    foreign = config_map(cluster.namespace)
    await refused(lambda: operator.create(CONFIG_MAPS, foreign), "only objects with the label")
    own = {keys.LABEL_MANAGED_BY: keys.MANAGED_BY}
    await refused(
        lambda: operator.create(CONFIG_MAPS, config_map(cluster.namespace, labels=own)), "that a HeteroTrainJob owns"
    )
    kept = await kube.create(CONFIG_MAPS, config_map(cluster.namespace))
    stolen = copy.deepcopy(kept)
    stolen["metadata"]["labels"] = own
    await refused(lambda: operator.replace(CONFIG_MAPS, stolen), "may change and delete only objects")
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "foreign", "namespace": cluster.namespace},
        "spec": {"containers": [{"name": "c", "image": "image.invalid/none:1"}], "nodeName": "nowhere"},
    }  # fmt: skip
    made = await kube.create(PODS, pod)
    uid = made["metadata"]["uid"]
    await refused(lambda: operator.delete(PODS, cluster.namespace, "foreign", uid=uid), "may change and delete only")


async def test_the_operator_can_do_its_work(cluster: Cluster, account: str, as_user: As) -> None:
    operator = await as_user(account)
    await refused(lambda: operator.create(CONFIG_MAPS, config_map(cluster.namespace)), "only objects with the label")
    job = parse_job(await cluster.create(cluster.job()))
    assert isinstance(job, ValidJob)
    await operator.apply(NETWORK_POLICIES, build_network_policy(job))
    await operator.apply(NETWORK_POLICIES, build_network_policy(job))
    pod = await operator.create(PODS, build_pod(job, job.spec.worker_pools[0], 0, plan_version="0.0"))
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    await operator.merge(PODS, cluster.namespace, name, {"metadata": {"annotations": {keys.ANNOTATION_PLAN: "1.1"}}})
    await operator.delete(PODS, cluster.namespace, name, uid=uid)


async def test_the_operator_writes_nothing_in_kube_system(kube: KubeClient, account: str, as_user: As) -> None:
    """Even with a role there, as an operator of the whole cluster has it."""
    binding = {
        "apiVersion": RBAC, "kind": "ClusterRoleBinding",
        "metadata": {"name": f"rights-{secrets.token_hex(3)}", "namespace": ""},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": account}],
    }  # fmt: skip
    made = await kube.apply(INSTALLED["ClusterRoleBinding"], binding)
    try:
        operator = await as_user(account)
        body = config_map("kube-system", labels={keys.LABEL_MANAGED_BY: keys.MANAGED_BY})
        await refused(lambda: operator.create(CONFIG_MAPS, body), "nothing in the namespaces of the cluster itself")
    finally:
        metadata = made["metadata"]
        await kube.delete(INSTALLED["ClusterRoleBinding"], "", metadata["name"], uid=metadata["uid"])


async def test_the_author_of_a_job_has_to_be_allowed_to_create_pods(
    kube: KubeClient, cluster: Cluster, account: str, as_user: As
) -> None:
    """An autoscaler without that right may still scale and suspend the job."""
    name = f"author-{secrets.token_hex(3)}"
    author = await as_user(name)
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}

    async def allow(role: str, rules: list[Body]) -> None:
        metadata = {"name": role, "namespace": cluster.namespace}
        await kube.apply(INSTALLED["Role"], {"apiVersion": RBAC, "kind": "Role", "metadata": metadata, "rules": rules})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}
        await kube.apply(
            INSTALLED["RoleBinding"],
            {
                "apiVersion": RBAC,
                "kind": "RoleBinding",
                "metadata": metadata,
                "roleRef": reference,
                "subjects": [subject],
            },
        )

    jobs = {"apiGroups": [keys.GROUP], "resources": [keys.PLURAL], "verbs": ["create", "patch", "get"]}
    await allow("jobs", [jobs])
    await refused(lambda: author.create(JOBS, cluster.job()), "need the right to create pods")
    with suppress(Conflict):  # made before the policy was in force
        await cluster.create(cluster.job())

    async def suspended() -> bool:
        with suppress(KubeError):  # until the role is in force
            await author.merge(JOBS, cluster.namespace, "job", {"spec": {"suspend": True}})
            return True
        return False

    await until(suspended, "the job is suspended by a user who may not create pods")
    template = {"spec": {"template": {"spec": {"serviceAccountName": "another"}}}}
    await refused(lambda: author.merge(JOBS, cluster.namespace, "job", template), "need the right to create pods")
    pools: list[Body] = cluster.job()["spec"]["workerPools"]
    own = {"spec": {"serviceAccountName": "another"}}
    of_a_pool = {"spec": {"workerPools": [{**pools[0], "template": own}, *pools[1:]]}}
    await refused(lambda: author.merge(JOBS, cluster.namespace, "job", of_a_pool), "need the right to create pods")
    of_a_new_pool = {"spec": {"workerPools": [*pools, {**pools[0], "name": "new", "template": own}]}}
    await refused(lambda: author.merge(JOBS, cluster.namespace, "job", of_a_new_pool), "need the right to create pods")
    larger = {"spec": {"workerPools": [{**pools[0], "maxReplicas": 2}, *pools[1:]]}}
    await author.merge(JOBS, cluster.namespace, "job", larger)
    await allow("pods", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}])

    async def created() -> bool:
        with suppress(Rejected):
            await author.create(JOBS, cluster.job(name="own"))
            return True
        return False

    await until(created, "a job of a user who may create pods")


@pytest.mark.changes_definition
async def test_a_status_is_written_under_an_older_definition_of_jobs(
    kube: KubeClient, cluster: Cluster, operator: Operator
) -> None:
    """The fields that the definition lacks are left out; without that, no status could be written at all."""
    older = copy.deepcopy(crd())
    (version,) = older["spec"]["versions"]
    for name in ("cost", "selector"):
        version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"].pop(name)
    version["subresources"]["scale"].pop("labelSelectorPath", None)
    older["metadata"]["namespace"] = ""
    await kube.apply(CRDS, older)
    try:
        await until(lambda: served(kube), "the older definition is served")
        await cluster.add_node("a")
        await cluster.create(cluster.job(cluster.pool("a", pricePerHour="1.00")))
        await cluster.started(1)

        async def running() -> bool:
            return (await cluster.status()).get("state") == "Running"

        await until(running, "the status says Running")
        status = await cluster.status()
        assert {"cost", "selector"}.isdisjoint(status)
        assert status["pricePerHour"] == "1.00"
    finally:
        await kube.apply(CRDS, {**crd(), "metadata": {**crd()["metadata"], "namespace": ""}})
