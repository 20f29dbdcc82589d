"""When a pool counts as exhausted: what a job cannot use goes to other jobs, and is tried again."""

from __future__ import annotations

from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.decide.allocation.allocate import EXHAUSTED_AFTER_S, RETRY_S
from support.fake_cluster import FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster


def a_cluster(*nodes: str, cpu: str = "1") -> MultiJobCluster:
    return MultiJobCluster(0).with_nodes(*nodes, cpu=cpu)


def test_an_exhausted_pool_goes_to_other_jobs_and_is_tried_again() -> None:
    """A cause that the operator cannot see keeps a job off pool b, although there seems to be room."""
    multi = a_cluster("a").with_nodes("b", cpu="3")
    blocked = multi.add("blocked", pool("a"), pool("b", maxReplicas=3))
    multi.add("other", pool("b", maxReplicas=3))
    schedule = blocked.schedule

    def nowhere_on_b() -> FakeCluster:
        before = set(multi.placed_pods("blocked"))
        schedule()
        for name in set(multi.placed_pods("blocked")) - before:
            body = blocked.pods[name]
            if body["spec"]["nodeName"] == "b":
                del body["spec"]["nodeName"]
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "a volume"}
                body["status"]["conditions"] = [{**refused, "lastTransitionTime": rfc3339(multi.now_s)}]
        return blocked

    blocked.schedule = nowhere_on_b  # type: ignore[method-assign]  # a fault that only the scheduler sees
    multi.settle()
    assert multi.limits() == {"blocked": {"a": 1, "b": 1}, "other": {"b": 2}}
    multi.now_s += EXHAUSTED_AFTER_S
    multi.settle()
    assert multi.placed() == {"blocked": {"a": 1}, "other": {"b": 3}}, "another job uses the node"
    assert set(blocked.grant.exhausted) == {"b"}
    assert "pool b: a volume" in blocked.message("Degraded")
    since = {each["name"]: each.get("exhaustedSince") for each in blocked.status["internal"]["pools"]}
    assert since == {"a": None, "b": rfc3339(blocked.grant.exhausted["b"].since_s)}
    multi.keeps_grants = False
    multi.settle()
    assert multi.placed() == {"blocked": {"a": 1}, "other": {"b": 3}}, "a new operator reads it from the status"
    multi.keeps_grants = True
    blocked.schedule = schedule  # type: ignore[method-assign]  # the fault is over
    multi.now_s += RETRY_S
    multi.settle()
    assert multi.placed() == {"blocked": {"a": 1, "b": 1}, "other": {"b": 2}}
    assert not blocked.grant.exhausted


def test_a_grant_that_waits_for_its_pass_exhausts_no_pool() -> None:
    """Among a thousand new jobs, that takes minutes. Their pools seemed exhausted, and stayed empty for ten more."""
    multi = a_cluster("a", cpu="4")
    for name in ("one", "two"):
        multi.add(name, pool("a", maxReplicas=4))
    for _ in range(4):
        for name, grant in multi.allocate().items():
            assert (grant.limits, dict(grant.exhausted)) == ({"a": 2}, {})
            multi.jobs[name].grant = grant
        multi.now_s += EXHAUSTED_AFTER_S
    multi.settle()
    assert multi.placed() == {"one": {"a": 2}, "two": {"a": 2}}


def test_a_running_job_whose_further_pods_a_quota_refuses_leaves_those_nodes_to_others() -> None:
    multi = a_cluster("a1", "a2", "a3", "a4")
    full = multi.add("full", pool("a", maxReplicas=4))
    multi.settle()
    multi.add("other", pool("a", maxReplicas=4))
    multi.settle()
    assert multi.placed() == {"full": {"a": 2}, "other": {"a": 2}}
    full.may_create, full.refusal = False, "exceeded quota: training"
    kept = multi.placed_pods("full")[0]
    for name in set(full.pods) - {kept}:
        full.vanish(name)
    for _ in range(3):
        multi.settle()
        multi.now_s += EXHAUSTED_AFTER_S
    multi.settle()
    assert full.condition("Running")[0] == "True"
    assert multi.placed() == {"full": {"a": 1}, "other": {"a": 3}}


def test_a_job_whose_pods_a_quota_refuses_leaves_its_nodes_to_others_after_a_minute() -> None:
    multi = a_cluster("a1", "a2", "a3", "a4")
    full = multi.add("full", pool("a", maxReplicas=4))
    multi.add("other", pool("a", maxReplicas=4))
    full.may_create, full.refusal = False, "exceeded quota: training"
    for _ in range(2):
        multi.settle()
        multi.now_s += EXHAUSTED_AFTER_S
    multi.settle()
    assert multi.placed() == {"full": {}, "other": {"a": 4}}
    assert full.condition("Scheduled") == ("False", "PodsRejected")
    assert "exceeded quota: training" in full.message("Scheduled")
    full.may_create, full.refusal = True, ""
    multi.now_s += RETRY_S
    multi.settle()
    assert multi.placed() == {"full": {"a": 2}, "other": {"a": 2}}, "the quota was raised"
