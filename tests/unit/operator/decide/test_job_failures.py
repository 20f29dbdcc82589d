"""Failing workers: which ends count as failures, how long replacements wait, and when the job fails."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.ended_pods import SIDECAR_S
from support.fake_cluster import FakeCluster, a_running_job, pool


def replaced(cluster: FakeCluster, *, after_s: float) -> None:
    """Decide about an end, and let a replacement run once the delay is over."""
    cluster.settle()
    cluster.pass_time(after_s)
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()


def test_own_failures_count_and_the_delay_doubles() -> None:
    cluster = a_running_job()
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="ValueError: no such file")
    decision = cluster.step()
    assert cluster.status["restarts"] == 1
    assert cluster.status["lastFailure"] == "job-w0: ValueError: no such file"
    assert decision.create == ()
    assert decision.again_s == pytest.approx(2.0)
    cluster.pass_time(2)
    assert [body["metadata"]["name"] for body in cluster.step().create] == ["job-w3"]
    cluster.schedule().run()
    cluster.settle()
    cluster.end("job-w3", Ending.FAILED, exit_code=1, reason="again")
    assert cluster.step().again_s == pytest.approx(4.0)
    assert cluster.status["restarts"] == 2


def test_a_failed_pod_stays_for_its_log_and_is_counted_once() -> None:
    cluster = a_running_job()
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    for _ in range(5):
        cluster.pass_time(10)
        cluster.step()
    assert "job-w0" in cluster.pods
    assert cluster.status["restarts"] == 1


def test_beyond_the_backoff_limit_the_job_fails_with_the_last_reason() -> None:
    cluster = a_running_job(backoffLimit=0)
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    cluster.settle()
    assert cluster.status["state"] == "Failed"
    assert cluster.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "boom" in cluster.status["reason"]
    assert cluster.condition("Stalled") == ("True", "BackoffLimitExceeded")
    assert cluster.status["completionTime"]


def test_workers_that_fail_together_are_one_failure() -> None:
    """One worker takes the others with it; the operator notices them in one pass or in several."""
    cluster = a_running_job(backoffLimit=1)
    cluster.pass_time(100)
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="first").pass_time(20)
    cluster.end("job-w1", Ending.FAILED, exit_code=1, reason="second")
    cluster.step()
    assert cluster.status["restarts"] == 1
    cluster.pass_time(25)
    cluster.end("job-w2", Ending.FAILED, exit_code=1, reason="third")
    decision = cluster.step()
    assert (cluster.status["restarts"], cluster.status["state"]) == (1, "Restarting")
    assert len(decision.create) == 3, "the delay counts from the first one"


def test_workers_that_fail_one_after_the_other_are_several_failures() -> None:
    cluster = a_running_job(backoffLimit=1)
    cluster.pass_time(100)
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="first").pass_time(31)
    cluster.end("job-w1", Ending.FAILED, exit_code=1, reason="second")
    cluster.settle()
    assert cluster.status["restarts"] == 2
    assert cluster.condition("Failed") == ("True", "BackoffLimitExceeded")


def test_replacements_that_fail_at_once_are_failures_of_their_own() -> None:
    """They would count once for ever if they were part of the incident that they replace."""
    cluster = a_running_job(backoffLimit=3)
    for _ in range(4):
        assert cluster.status["state"] != "Failed"
        cluster.end(cluster.members()[-1], Ending.FAILED, exit_code=1, reason="again")
        replaced(cluster, after_s=20)
    assert cluster.condition("Failed") == ("True", "BackoffLimitExceeded")


def test_a_worker_that_is_killed_right_after_its_start_is_replaced_later() -> None:
    """The cause may persist: without a pause, workers would be created and killed in a hot loop."""
    cluster = a_running_job()
    cluster.pass_time(3)
    cluster.end("job-w0", exit_code=137)
    decision = cluster.step()
    assert decision.create == ()
    assert decision.again_s == pytest.approx(10.0)
    assert "job-w0" in cluster.pods
    cluster.pass_time(11)
    cluster.settle()
    assert sorted(cluster.pods) == ["job-w1", "job-w2", "job-w3"]


def test_a_probe_that_fails_for_ever_fails_the_job() -> None:
    """The kubelet asks each worker to end, which it does in order; nothing else asks for it."""
    probe = {"exec": {"command": ["false"]}}
    template = {"spec": {"containers": [{"name": "main", "image": "image", "livenessProbe": probe}]}}
    cluster = a_running_job(backoffLimit=2, template=template)
    for _ in range(3):
        assert cluster.status["state"] == "Running"
        cluster.end(cluster.members()[0], Ending.LEFT, told=True)
        replaced(cluster, after_s=300)
    assert cluster.status["restarts"] == 3
    assert cluster.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "livenessProbe" in cluster.status["reason"]


def test_disruptions_never_fail_a_job() -> None:
    cluster = a_running_job(backoffLimit=0)
    for _ in range(4):
        cluster.end(cluster.members()[0], exit_code=137, pod_reason="NodeShutdown")
        replaced(cluster, after_s=700)
    assert cluster.status["disruptions"] == 4
    assert cluster.status["restarts"] == 0
    assert cluster.status["state"] == "Running"


def test_a_worker_that_came_back_with_its_node_is_charged_for_its_own_failure() -> None:
    """Its loss was a disruption; what it does afterwards is its own."""
    cluster = FakeCluster(pool("a", maxReplicas=2)).with_nodes("a", "a2", cpu="1").start()
    name = min(cluster.pods)
    node = cluster.pods[name]["spec"]["nodeName"]
    cluster.set_node(node, "Unknown")
    cluster.settle()
    assert cluster.status["disruptions"] == 1
    cluster.set_node(node, "True")
    cluster.settle()
    assert name in cluster.members()
    cluster.end(name, Ending.FAILED, exit_code=1, reason="boom")
    cluster.settle()
    assert (cluster.status["disruptions"], cluster.status["restarts"]) == (1, 1)


def test_a_failed_worker_whose_sidecar_still_runs_gives_its_node_to_the_successor() -> None:
    template = {"spec": {"containers": [{"name": "main", "image": "i"}, {"name": "proxy", "image": "i"}]}}
    wide = pool("a", maxReplicas=2, resources={"limits": {"cpu": "2"}})
    cluster = FakeCluster(wide, template=template).with_nodes("a", cpu="4").start()
    name = min(cluster.pods)
    cluster.end(name, Ending.FAILED, exit_code=1, reason="boom")
    cluster.pods[name]["status"]["phase"] = "Running"
    cluster.pods[name]["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})
    decision = cluster.settle()
    assert "deletionTimestamp" not in cluster.pods[name]["metadata"], "the other container may be about to end"
    assert decision.again_s is not None
    assert decision.again_s <= SIDECAR_S
    cluster.pass_time(SIDECAR_S + 1.0).settle()
    assert "deletionTimestamp" in cluster.pods[name]["metadata"]
    cluster.vanish(name).settle()
    cluster.schedule().run().settle()
    assert len(cluster.members()) == 2


def ruled(*rules: dict[str, object], **policy: object) -> FakeCluster:
    """Return a running job with these rules about failures."""
    return a_running_job(failurePolicy={"rules": list(rules), **policy})


def test_a_rule_fails_the_job_at_once() -> None:
    cluster = ruled({"action": "Fail", "onExitCodes": {"values": [42]}})
    cluster.end("job-w0", Ending.FAILED, exit_code=42, reason="no licence")
    cluster.settle()
    assert cluster.condition("Failed") == ("True", "FailurePolicy")
    assert "no licence (failurePolicy.rules[0] fails the job)" in cluster.status["reason"]


def test_the_first_rule_that_matches_decides_and_an_ignored_failure_is_a_disruption() -> None:
    cluster = ruled(
        {"action": "Fail", "onExitCodes": {"operator": "NotIn", "values": [7]}},
        {"action": "Ignore", "onReasons": ["Error"]},
        {"action": "Fail", "onExitCodes": {"values": [7]}},
    )
    cluster.end("job-w0", Ending.FAILED, exit_code=7, reason="the licence server is busy")
    cluster.settle()
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (0, 1)
    assert cluster.condition("Failed") == ("False", "NotEnded")


def test_a_rule_counts_a_kill_from_outside_as_a_failure() -> None:
    cluster = ruled({"action": "Restart", "onExitCodes": {"values": [137]}})
    cluster.end("job-w0", exit_code=137)
    cluster.settle()
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (1, 0)


def fails_on(cluster: FakeCluster, node: str, reason: str) -> None:
    """Let the worker on the node fail, and its replacement run."""
    (name,) = (view.name for view in cluster.pod_views if view.node == node and not view.terminal)
    cluster.end(name, Ending.FAILED, exit_code=1, reason=reason)
    for _ in range(4):
        replaced(cluster, after_s=60)


def test_a_node_is_avoided_after_two_failures_while_others_went_on() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3)).with_nodes("a1", "a2", "a3", cpu="1").start()
    for failures in (1, 2):
        fails_on(cluster, "a1", "uncorrectable ECC error")
        (found,) = cluster.status["nodesWithFailures"]
        assert (found["name"], found["failures"], found["avoided"]) == ("a1", failures, failures == 2)
    assert "ECC" in found["reason"]
    assert {view.node for view in cluster.pod_views if not view.terminal} <= {"a2", "a3", ""}
    cluster.with_nodes("a4", cpu="1")
    replaced(cluster, after_s=60)
    assert {view.node for view in cluster.pod_views if not view.terminal} == {"a2", "a3", "a4"}
    cluster.pass_time(86_400)
    cluster.settle()
    assert not cluster.status.get("nodesWithFailures"), "it is used again after a day"


def test_a_job_that_would_have_no_node_left_uses_the_avoided_one() -> None:
    cluster = FakeCluster(pool("a"), pool("b")).with_nodes("a", "b").start()
    for _ in range(3):
        fails_on(cluster, "a", "out of luck")
    assert cluster.status["nodesWithFailures"][0]["avoided"]
    assert {view.node for view in cluster.pod_views if not view.terminal} == {"a", "b"}


def test_failures_of_all_workers_are_no_node_s_fault() -> None:
    cluster = a_running_job()
    for name in ("job-w0", "job-w1", "job-w2"):
        cluster.end(name, Ending.FAILED, exit_code=1, reason="a mistake in the script")
    cluster.settle()
    assert not cluster.status.get("nodesWithFailures")


def test_a_rule_makes_the_job_avoid_a_node_at_once() -> None:
    cluster = ruled({"action": "AvoidNode", "onReasons": ["Error"]})
    node = cluster.pods["job-w0"]["spec"]["nodeName"]
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="CUDA error: device lost")
    cluster.settle()
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (0, 1)
    assert [(each["name"], each["avoided"]) for each in cluster.status["nodesWithFailures"]] == [(node, True)]
