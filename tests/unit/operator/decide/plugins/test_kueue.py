"""A job's pods as one group of Kueue: names, sizes, places, and what the operator lets go."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.objects.pods import problem_of_templates
from heterotrain_operator.decide.plugins.kueue.plugin import COUNT, FINALIZER, GROUP, RETRIABLE, ROLE, SERVING
from support.fake_cluster import FakeCluster, job_body, pool

SPECS = {"spec": {"containers": [{"name": "main", "image": "x"}]}}


def template(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"labels": {GROUP: "mine"}, "annotations": annotations}, **SPECS}


def a_group(size: int = 2) -> FakeCluster:
    """Return a job of fixed size in a group; its pods get Kueue's finalizer, and nodes at once."""
    pools = [pool("a", maxReplicas=size)]
    spec = {"elasticPolicy": {"minReplicas": size}}
    return FakeCluster(*pools, spec=spec, template=template()).with_nodes("a")


def admitted(cluster: FakeCluster) -> FakeCluster:
    """Let Kueue, the scheduler and the kubelets act on new pods."""
    for body in cluster.pods.values():
        body["metadata"]["finalizers"] = ["example.com/other", FINALIZER]
    cluster.schedule().run()
    cluster.settle()
    return cluster


def running(size: int = 2) -> FakeCluster:
    cluster = a_group(size)
    cluster.settle()
    return admitted(cluster)


def groups(cluster: FakeCluster) -> set[str]:
    return {body["metadata"]["labels"][GROUP] for body in cluster.pods.values()}


def let_go(decision: Decision) -> list[str]:
    """Return the pods that lose Kueue's finalizer."""
    return [edit.pod.name for edit in decision.edits if edit.finalizer == FINALIZER]


def told(decision: Decision) -> set[str]:
    """Return the pods that end their group."""
    return {edit.pod.name for edit in decision.edits if edit.annotations == {SERVING: None, RETRIABLE: "false"}}


def deleted(cluster: FakeCluster, *names: str) -> None:
    for name in names or list(cluster.pods):
        cluster.pods[name]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"


def test_members_have_the_group_of_their_job_its_size_and_their_pool_as_role() -> None:
    pools = [pool("a", maxReplicas=2), pool("b")]
    cluster = FakeCluster(*pools, spec={"elasticPolicy": {"minReplicas": 3}}, template=template()).with_nodes("a", "b")
    cluster.settle()
    assert groups(cluster) == {"mine-job-uid"}
    notes = [body["metadata"]["annotations"] for body in cluster.pods.values()]
    assert [each[COUNT] for each in notes] == ["3", "3", "3"]
    assert [each[SERVING] for each in notes] == ["true", "true", "true"]
    by_pool = {body["metadata"]["labels"][keys.LABEL_POOL]: body for body in cluster.pods.values()}
    assert len({body["metadata"]["annotations"][ROLE] for body in by_pool.values()}) == 2
    assert len({each[ROLE] for each in notes}) == 2


def test_the_replacement_of_a_failed_worker_joins_its_group() -> None:
    cluster = running()
    before = groups(cluster)
    cluster.pass_time(100.0)
    cluster.end("job-w0", Ending.FAILED)
    cluster.pods["job-w0"]["status"]["phase"] = "Failed"
    cluster.settle()
    cluster.pass_time(60.0).settle()
    assert "job-w2" in cluster.pods
    assert groups(cluster) == before


def test_a_worker_that_leaves_keeps_its_place_until_it_is_gone() -> None:
    cluster = running()
    before = groups(cluster)
    deleted(cluster, "job-w0")
    cluster.settle()
    assert set(cluster.pods) == {"job-w0", "job-w1"}, "Kueue would delete a third member"
    assert "no place before they are gone: job-w0" in cluster.message("WorkersLimited") + cluster.message("Degraded")
    cluster.end("job-w0", Ending.LEFT)
    cluster.pods["job-w0"]["status"]["phase"] = "Succeeded"
    decision = cluster.settle()
    assert let_go(cluster.step()) == ["job-w0"], decision
    cluster.vanish("job-w0")
    cluster.settle()
    assert set(cluster.pods) == {"job-w0", "job-w1"}, "its replacement"
    assert groups(cluster) == before


def test_deleted_pods_that_never_ran_are_let_go() -> None:
    cluster = a_group()
    cluster.settle()
    for body in cluster.pods.values():
        body["metadata"]["finalizers"] = [FINALIZER]
    assert let_go(cluster.step()) == []
    before = set(cluster.pods)
    deleted(cluster)
    assert set(let_go(cluster.step())) == before


def test_pods_outside_of_groups_are_left_to_kueue() -> None:
    cluster = running()
    for body in cluster.pods.values():
        del body["metadata"]["labels"][GROUP]
        body["status"]["phase"] = "Failed"
    deleted(cluster)
    assert let_go(cluster.step()) == []


def test_the_pods_that_an_ended_job_keeps_end_their_group_once() -> None:
    cluster = running()
    cluster.edit(lambda spec: spec.update(backoffLimit=0, cleanPodPolicy="None"))
    cluster.end("job-w0", Ending.FAILED)
    cluster.pods["job-w0"]["status"]["phase"] = "Failed"
    cluster.settle()
    assert cluster.condition("Failed")[0] == "True"
    assert told(cluster.step()) == {"job-w0", "job-w1"}
    for body in cluster.pods.values():
        body["metadata"]["annotations"][RETRIABLE] = "false"
    assert told(cluster.step()) == set()


@pytest.mark.parametrize(
    ("pools", "least", "annotations", "sentence"),
    [
        ([pool("a", maxReplicas=3)], 2, {}, "set elasticPolicy.minReplicas to 3"),
        ([pool(f"p{n}") for n in range(9)], 9, {}, "use at most 8 worker pools"),
        ([pool("a", maxReplicas=3)], 3, {COUNT: "4"}, "is 4, but the job has 3 workers"),
        ([pool("a", maxReplicas=3)], 3, {COUNT: "3"}, ""),
        ([pool("a", maxReplicas=3)], 3, {}, ""),
    ],
)
def test_a_group_that_could_never_be_complete_is_refused(
    pools: list[dict[str, Any]], least: int, annotations: dict[str, str], sentence: str
) -> None:
    spec = {"elasticPolicy": {"minReplicas": least}}
    job = parse_job(job_body(*pools, spec=spec, template=template(**annotations)))
    assert job.spec is not None
    problem = problem_of_templates(job.template, job.spec, job.patches)
    assert (sentence in problem) if sentence else problem == ""
