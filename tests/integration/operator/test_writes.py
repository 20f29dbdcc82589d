"""The operator's writes on a real API server: idempotent, never over unread states, and without reviving objects."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.plan import Plan
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import build_disruption_budget, build_network_policy, build_plan_object
from heterotrain_operator.decide.objects.pods import build_pod
from heterotrain_operator.decide.status.events import JobEvent
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.publisher import Publisher
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Conflict, NotFound, Rejected
from heterotrain_operator.kube.resources import CONFIG_MAPS, DISRUPTION_BUDGETS, EVENTS, JOBS, NETWORK_POLICIES, PODS
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster


async def a_job(cluster: Cluster) -> Body:
    return await cluster.create(cluster.job())


async def a_parsed_job(cluster: Cluster) -> ValidJob:
    """Create a job, and return it as the operator sees it."""
    job = parse_job(await cluster.create(cluster.job()))
    assert isinstance(job, ValidJob)
    return job


async def test_applying_twice_changes_nothing(cluster: Cluster, kube: KubeClient) -> None:
    job = await a_parsed_job(cluster)
    budget = build_disruption_budget(job, ())
    assert budget is not None
    for resource, body in ((NETWORK_POLICIES, build_network_policy(job)), (DISRUPTION_BUDGETS, budget)):
        first = await kube.apply(resource, body)
        second = await kube.apply(resource, body)
        # Not by resourceVersion: the budget's controller writes its status at any time.
        managed = [
            [each for each in found["metadata"]["managedFields"] if each["manager"] == keys.FIELD_MANAGER]
            for found in (first, second)
        ]
        assert len(managed[0]) == 1
        assert managed[0] == managed[1], "the second apply changed the time of the operator's last write"
        assert first["spec"] == second["spec"]


async def test_an_apply_reverts_a_changed_field(cluster: Cluster, kube: KubeClient) -> None:
    policy = build_network_policy(await a_parsed_job(cluster))
    await kube.apply(NETWORK_POLICIES, policy)
    name = keys.network_policy_name("job")
    await kube.merge(NETWORK_POLICIES, cluster.namespace, name, {"spec": {"ingress": []}})
    again = await kube.apply(NETWORK_POLICIES, policy)
    assert len(again["spec"]["ingress"]) == len(policy["spec"]["ingress"])


async def test_a_plan_only_replaces_the_one_that_was_read(cluster: Cluster, kube: KubeClient) -> None:
    """A deposed leader that resumes late must not replace a newer plan."""
    job = parse_job(await a_job(cluster))

    def plan(revision: int, version: str | None) -> Body:
        made = Plan(job_uid=job.uid, generation=0, revision=revision, members=(), ranks=(), global_batch_samples=100)
        return build_plan_object(job, made, resource_version=version)

    first = await kube.create(CONFIG_MAPS, plan(0, None))
    read = first["metadata"]["resourceVersion"]
    await kube.replace(CONFIG_MAPS, plan(1, read))
    with pytest.raises(Conflict):
        await kube.replace(CONFIG_MAPS, plan(2, read))
    with pytest.raises(Conflict):
        await kube.create(CONFIG_MAPS, plan(3, None))
    assert (await cluster.plan())["revision"] == 1


async def test_a_status_does_not_revive_a_deleted_job(cluster: Cluster, kube: KubeClient) -> None:
    job = await a_job(cluster)
    metadata = {"name": "job", "namespace": cluster.namespace, "uid": job["metadata"]["uid"]}
    body = {"apiVersion": JOBS.api_version, "kind": keys.KIND, "metadata": metadata, "status": {"state": "Running"}}
    await kube.apply(JOBS, body, subresource="status")
    await kube.delete(JOBS, cluster.namespace, "job", uid=metadata["uid"])
    with pytest.raises(NotFound):
        await kube.apply(JOBS, body, subresource="status")


async def test_a_status_for_another_job_of_the_same_name_is_a_conflict(cluster: Cluster, kube: KubeClient) -> None:
    old = await a_job(cluster)
    await kube.delete(JOBS, cluster.namespace, "job", uid=old["metadata"]["uid"])
    await a_job(cluster)
    metadata = {name: old["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
    body = {"apiVersion": JOBS.api_version, "kind": keys.KIND, "metadata": metadata, "status": {"state": "Running"}}
    with pytest.raises(Conflict):
        await kube.apply(JOBS, body, subresource="status")
    assert await cluster.status() == {}


async def test_a_pod_with_another_uid_is_not_deleted(cluster: Cluster, kube: KubeClient) -> None:
    job = parse_job(await a_job(cluster))
    assert job.spec is not None
    await kube.create(PODS, build_pod(job, job.spec.worker_pools[0], 0, plan_version="0.0"))
    with pytest.raises(Conflict):
        await kube.delete(PODS, cluster.namespace, "job-w0", uid="00000000-0000-0000-0000-000000000000")
    assert "job-w0" in await cluster.pods()


async def test_a_dry_run_finds_errors_that_the_schema_does_not_cover(cluster: Cluster, kube: KubeClient) -> None:
    body = cluster.job()
    body["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    job = parse_job(await cluster.create(body))
    assert job.spec is not None
    with pytest.raises(Rejected, match="imagePullPolice"):
        await kube.create(PODS, build_pod(job, job.spec.worker_pools[0], 0, plan_version=""), dry_run=True)
    assert await cluster.pods() == {}


async def test_the_built_pod_is_accepted_word_for_word(cluster: Cluster, kube: KubeClient) -> None:
    """All fields of the user survive the round trip next to the operator's additions."""
    body = cluster.job()
    spec = body["spec"]["template"]["spec"]
    spec["containers"][0] |= {
        "env": [{"name": "A", "value": "b"}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec["containers"].append({"name": "side", "image": "image.invalid/side:1"})
    spec["volumes"] = [{"name": "data", "emptyDir": {}}]
    spec["tolerations"] = [{"key": "mine", "operator": "Exists"}]
    job = parse_job(await cluster.create(body))
    assert job.spec is not None
    pod = await kube.create(PODS, build_pod(job, job.spec.worker_pools[0], 0, plan_version="0.0"))
    assert [each["name"] for each in pod["spec"]["containers"]] == ["main", "side"]
    main = pod["spec"]["containers"][0]
    assert {"name": "A", "value": "b"} in main["env"]
    assert {"/data", "/dev/shm", "/etc/heterotrain/plan"} <= {each["mountPath"] for each in main["volumeMounts"]}
    assert {"mine", "ht-test", "node.kubernetes.io/unreachable"} <= {
        each.get("key") for each in pod["spec"]["tolerations"]
    }
    assert pod["spec"]["restartPolicy"] == "Never"


async def test_a_repeated_event_is_counted(cluster: Cluster, kube: KubeClient) -> None:
    job, publisher = await a_parsed_job(cluster), Publisher(kube, clocks=Clocks())
    for _ in range(3):
        publisher.add(job, JobEvent(warning=True, reason="WorkerFailed", message="boom"))
    await publisher.flush()
    events = [event async for event in kube.list(EVENTS, cluster.namespace)]
    assert [(event["reason"], event["count"]) for event in events] == [("WorkerFailed", 3)]
