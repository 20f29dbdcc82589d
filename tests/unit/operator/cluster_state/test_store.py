"""The store under races: watch events, full lists and the operator's own writes arrive in any order."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_operator.cluster_state.node_changes import NodeChanges
from heterotrain_operator.cluster_state.parse import parse_job, parse_pod
from heterotrain_operator.cluster_state.store import PodKind, Sequence, Store
from heterotrain_operator.cluster_state.views import JobKey, PodView
from support.fake_cluster import FakeCluster, job_body

KEY = JobKey("ns", "job")


def a_pod(version: int, *, name: str = "job-w0", node: str = "n", phase: str = "Running") -> PodView:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.step()
    body = cluster.pods[name]
    body["metadata"]["resourceVersion"] = str(version)
    body["spec"]["nodeName"] = node
    body["status"]["phase"] = phase
    view = parse_pod(body)
    assert view is not None
    return view


def test_an_object_never_goes_back_to_an_older_version() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    assert pods.put(a_pod(10))
    assert not pods.put(a_pod(9, phase="Pending")), (
        "the operator's own write was stored before the watch delivered the state before it"
    )
    assert not pods.put(a_pod(10))
    assert pods.of_job(KEY)[0].phase == "Running"
    assert pods.put(a_pod(100)), "versions are compared as numbers"


def test_a_list_replaces_objects_that_have_not_changed_since_it_began() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    pods.put(a_pod(1, name="job-w0"))
    pods.put(a_pod(2, name="job-w1"))
    since = pods.begin_list()
    assert pods.replace([a_pod(5, name="job-w1"), a_pod(6, name="job-w2")], since=since) == {
        ("ns", "job-w0"),
        ("ns", "job-w1"),
        ("ns", "job-w2"),
    }
    assert [pod.name for pod in pods.of_job(KEY)] == ["job-w1", "job-w2"]


def test_a_list_does_not_undo_newer_events() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    pods.put(a_pod(1, name="job-w0"))
    pods.put(a_pod(2, name="job-w1"))
    since = pods.begin_list()
    pods.discard(("ns", "job-w0"))
    pods.put(a_pod(9, name="job-w1"))
    pods.put(a_pod(10, name="job-w2"))
    pods.replace([a_pod(1, name="job-w0"), a_pod(2, name="job-w1")], since=since)
    assert {pod.name: pod.resource_version for pod in pods.of_job(KEY)} == {"job-w1": "9", "job-w2": "10"}


def test_an_object_deleted_during_one_list_may_come_back_in_the_next() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    since = pods.begin_list()
    pods.discard(("ns", "job-w0"))
    pods.replace([], since=since)
    pods.replace([a_pod(20)], since=pods.begin_list())
    assert len(pods.of_job(KEY)) == 1


def test_sums_of_requests_follow_every_change() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    pods.put(a_pod(1, name="job-w0"))
    pods.put(a_pod(2, name="job-w1"))
    assert pods.used["n"]["cpu"] == 2.0
    pods.put(a_pod(3, name="job-w1", phase="Succeeded"))
    assert pods.used["n"]["cpu"] == 1.0
    pods.put(a_pod(4, name="job-w0", node="m"))
    assert pods.used["n"]["cpu"] == 0.0
    assert pods.used["m"]["cpu"] == 1.0
    pods.discard(("ns", "job-w0"))
    assert pods.used["m"]["cpu"] == 0.0
    pods.replace([a_pod(9, name="job-w2")], since=pods.begin_list())
    assert pods.used == {"n": {"cpu": 1.0, "pods": 1.0}}


def test_a_job_s_pods_are_ordered_by_index() -> None:
    pods = PodKind(Sequence(), NodeChanges())
    for version, name in enumerate(("job-w2", "job-w0", "job-w1"), start=1):
        pods.put(a_pod(version, name=name))
    assert [pod.index for pod in pods.of_job(KEY)] == [0, 1, 2]
    assert pods.of_job(JobKey("ns", "other")) == ()


def test_jobs_are_ordered_by_the_last_change_of_anything_of_theirs() -> None:
    store = Store()
    jobs = {name: parse_job(job_body(name=name)) for name in ("a", "b", "c")}
    store.jobs.replace(jobs.values(), since=store.jobs.begin_list())
    assert [key.name for key in store.newest_first()] == ["a", "b", "c"], "nothing has changed since the first list"
    store.jobs.put(parse_job(job_body(name="b", resourceVersion="2")))
    assert [key.name for key in store.newest_first()] == ["b", "a", "c"]
    store.pods.put(replace(a_pod(1), key=JobKey("ns", "c")))
    assert [key.name for key in store.newest_first()] == ["c", "b", "a"]
