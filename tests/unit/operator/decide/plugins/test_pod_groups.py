"""The PodGroup of a job and its members, for each scheduler with groups, and when the group exists."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import build_plugin_objects
from heterotrain_operator.decide.objects.pods import build_pod
from support.fake_cluster import Body, FakeCluster, a_running_job, job_body, pool


def a_job(*pools: Body, template: Body | None = None, **spec: Any) -> ValidJob:
    job = parse_job(job_body(*(pools or (pool("a", maxReplicas=4),)), template=template, spec=spec))
    assert isinstance(job, ValidJob), job.problem
    return job


def group_of(job: ValidJob) -> Body:
    (found,) = build_plugin_objects(job)
    return found


MEMBERS: dict[str, tuple[str, Body, Body, str]] = {
    "Volcano": (
        "scheduling.volcano.sh/v1beta1",
        {},
        {"scheduling.k8s.io/group-name": "job-workers", "scheduling.volcano.sh/group-name": "job-workers"},
        "volcano",
    ),
    "KAI": (
        "scheduling.run.ai/v2alpha2",
        {},
        {"pod-group-name": "job-workers", "kai.scheduler/skip-podgrouper": "true"},
        "kai-scheduler",
    ),
    "Coscheduling": (
        "scheduling.x-k8s.io/v1alpha1",
        {"scheduling.x-k8s.io/pod-group": "job-workers"},
        {},
        "scheduler-plugins-scheduler",
    ),
}


@pytest.mark.parametrize("scheduler", MEMBERS)
def test_group_and_members_are_what_the_scheduler_reads(scheduler: str) -> None:
    """The job owns the group, so that it goes with the job."""
    version, labels, annotations, name = MEMBERS[scheduler]
    given = {"scheduler": scheduler, **({"queue": "research"} if scheduler == "KAI" else {})}
    job = a_job(podGroup=given)
    group = group_of(job)
    assert (group["apiVersion"], group["kind"], group["metadata"]["name"]) == (version, "PodGroup", "job-workers")
    assert group["metadata"]["ownerReferences"][0]["uid"] == job.uid
    assert group["spec"] == {"minMember": 1, **({"queue": "research"} if scheduler == "KAI" else {})}
    pod = build_pod(job, job.spec.worker_pools[0], 0, plan_version="1.1")
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert annotations.items() <= pod["metadata"]["annotations"].items()
    assert pod["spec"]["schedulerName"] == name


def test_a_scheduler_of_another_name_is_the_template_s_choice() -> None:
    template = {"spec": {"schedulerName": "my-volcano", "containers": [{"name": "main", "image": "image"}]}}
    job = a_job(template=template, podGroup={"scheduler": "Volcano"})
    assert build_pod(job, job.spec.worker_pools[0], 0, plan_version="1.1")["spec"]["schedulerName"] == "my-volcano"


def test_the_minimum_is_the_one_below_which_training_does_not_start() -> None:
    """Workers beyond it join one by one."""
    pools = (pool("a", minReplicas=2, maxReplicas=4), pool("b", minReplicas=1, maxReplicas=4))
    group = {"scheduler": "Volcano"}
    assert group_of(a_job(*pools, podGroup=group))["spec"]["minMember"] == 3
    assert group_of(a_job(*pools, podGroup=group, elasticPolicy={"minReplicas": 5}))["spec"]["minMember"] == 5


def test_the_priority_is_that_of_the_pods_where_groups_have_one() -> None:
    template = {"spec": {"priorityClassName": "high", "containers": [{"name": "main", "image": "image"}]}}
    found = {
        scheduler: group_of(a_job(template=template, podGroup={"scheduler": scheduler, **queue}))["spec"]
        for scheduler, queue in (("Volcano", {}), ("KAI", {"queue": "q"}), ("Coscheduling", {}))
    }
    assert {name: spec.get("priorityClassName") for name, spec in found.items()} == {
        "Volcano": "high",
        "KAI": "high",
        "Coscheduling": None,
    }


def test_without_the_field_there_is_no_group() -> None:
    job = a_job()
    assert build_plugin_objects(job) == ()
    assert "schedulerName" not in build_pod(job, job.spec.worker_pools[0], 0, plan_version="1.1")["spec"]


def kinds(bodies: tuple[Body, ...]) -> list[str]:
    return [body["kind"] for body in bodies]


def test_a_suspended_job_gives_its_group_back_and_a_running_one_keeps_it() -> None:
    """A group without pods would still count in its queue."""
    cluster = a_running_job(podGroup={"scheduler": "Volcano"})
    running = cluster.step()
    assert "PodGroup" in kinds(running.apply)
    assert running.release == ()
    cluster.edit(lambda spec: spec.update(suspend=True))
    suspended = cluster.step()
    assert suspended.apply == ()
    assert kinds(suspended.release) == ["PodGroup"]


def test_a_group_that_waits_keeps_all_pods_of_its_minimum() -> None:
    """Its scheduler places none before all exist; otherwise surplus pods go after ten seconds."""
    cluster = FakeCluster(
        pool("a", maxReplicas=4), spec={"elasticPolicy": {"minReplicas": 3}, "podGroup": {"scheduler": "Volcano"}}
    )
    cluster.settle()
    for _ in range(3):
        cluster.schedule().pass_time(60.0).settle()
    assert len([body for body in cluster.pods.values() if "deletionTimestamp" not in body["metadata"]]) >= 3
