"""Members of a job: workers that join, are about to leave, are lost and return, pass by pass on a fake cluster."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.grant import JobGrant
from support.fake_cluster import FakeCluster, a_running_job, pool

SPOT_TAINT = "aws-node-termination-handler/spot-itn:NoSchedule"


def test_a_new_job_gets_a_waiting_plan_before_its_pods_and_a_worker_in_each_pool() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    decision = cluster.step()
    assert decision.apply == (), "no budget without members"
    assert cluster.version() == (0, 0)
    assert cluster.members() == []
    assert [body["spec"]["nodeSelector"] for body in decision.create] == [{"pool": "a"}, {"pool": "b"}, {"pool": "c"}]
    assert sorted(cluster.pods) == ["job-w0", "job-w1", "job-w2"]
    assert cluster.status["state"] == "Pending"


def test_ready_workers_become_generation_one_with_even_shares() -> None:
    cluster = a_running_job()
    assert cluster.version()[0] == 1
    assert cluster.members() == ["job-w0", "job-w1", "job-w2"]
    assert [member["share_samples"] for member in cluster.plan_json["members"]] == [34, 33, 33]
    assert cluster.status["state"] == "Running"
    assert cluster.condition("Ready") == ("True", "Training")
    assert cluster.status["ready"] == "3/3"


def test_a_pool_without_room_delays_nothing() -> None:
    """Two of three pools have nodes: training starts with two workers, the third waits for its node."""
    cluster = FakeCluster(spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", "b").start()
    assert cluster.members() == ["job-w0", "job-w1"]
    assert cluster.status["state"] == "Degraded"
    assert "pool c" in cluster.status["reason"]
    cluster.with_nodes("c").schedule().run()
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w1", "job-w2"]
    assert cluster.status["state"] == "Running"


def test_a_job_that_grows_is_no_warning_until_a_worker_finds_no_node() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3)).with_nodes("a", cpu="8")
    cluster.grant = JobGrant(limits={"a": 2}, reason="starts with 2 a")
    cluster.start()
    assert cluster.members() == ["job-w0", "job-w1"]
    cluster.grant = JobGrant(limits={"a": 3}, reason="+1 a: +20% speed")
    cluster.settle()
    for _ in range(2):  # created, then with a node
        assert cluster.condition("Degraded") == ("True", "WorkersStarting")
        cluster.schedule()
        cluster.settle()
    assert "Degraded" not in cluster.events
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    del cluster.pods["job-w2"]["spec"]["nodeName"]
    cluster.pods["job-w2"]["status"] = {"phase": "Pending", "conditions": [refused]}
    cluster.settle()
    assert cluster.condition("Degraded") == ("True", "InsufficientCapacity")
    assert "Degraded" in cluster.events


def test_training_waits_below_the_minimum() -> None:
    cluster = FakeCluster(spec={"elasticPolicy": {"minReplicas": 3}}).with_nodes("a", "b").start()
    assert cluster.version()[0] == 0
    assert cluster.status["state"] == "Pending"
    assert cluster.condition("Scheduled") == ("False", "Unschedulable")


def test_a_pool_s_own_minimum_is_needed_before_training_starts() -> None:
    cluster = FakeCluster(pool("a"), pool("b", minReplicas=1)).with_nodes("a").start()
    assert cluster.version()[0] == 0
    assert "below their minReplicas: b" in cluster.status["reason"]
    cluster.with_nodes("b").schedule().run()
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w1"]


def test_a_worker_is_not_named_before_it_is_ready() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule().run(ready=False)
    cluster.settle()
    assert cluster.version()[0] == 0
    assert cluster.status["state"] == "Starting"


def test_ready_workers_wait_a_short_time_for_starting_ones() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule().run(ready=False)
    cluster.set_ready("job-w0")
    decision = cluster.step()
    assert cluster.version()[0] == 0
    assert decision.again_s == pytest.approx(5.0, abs=1.0)
    cluster.pass_time(6)
    cluster.settle()
    assert cluster.members() == ["job-w0"]


def test_a_loss_does_not_wait_and_ready_workers_join_at_once() -> None:
    cluster = FakeCluster(pool("a"), pool("b"), pool("c"), pool("d")).with_nodes("a", "b").start()
    cluster.with_nodes("c", "d").schedule().run(ready=False)
    cluster.set_ready("job-w2")
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w1"], "the two joining workers are gathered"
    cluster.vanish("job-w1")
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w2"]


def test_a_member_that_loses_readiness_stays_a_member() -> None:
    """A busy device answers its probe late; that does not justify a pause of all members."""
    cluster = a_running_job()
    before = cluster.version()
    cluster.set_ready("job-w1", ready=False)
    cluster.settle()
    assert cluster.version() == before


def test_an_announced_loss_is_drained_then_left_out() -> None:
    cluster = a_running_job()
    generation, revision = cluster.version()
    cluster.taint("c", SPOT_TAINT)
    cluster.settle()
    assert cluster.version() == (generation, revision + 1)
    assert cluster.plan_json["drain"] == ["job-w2"]
    assert cluster.status["state"] == "Resizing"
    assert cluster.message("Degraded").startswith("2 of 3 workers continue training")
    cluster.end("job-w2", Ending.LEFT, reason="asked to end")
    cluster.settle()
    assert cluster.version()[0] == generation + 1
    assert cluster.members() == ["job-w0", "job-w1"]
    assert cluster.plan_json["drain"] == []
    assert cluster.status["disruptions"] == 1
    assert cluster.status["restarts"] == 0


def test_a_withdrawn_announcement_empties_the_drain_list() -> None:
    cluster = a_running_job()
    cluster.taint("c", SPOT_TAINT)
    cluster.settle()
    cluster.nodes["c"]["spec"]["taints"].clear()
    cluster.settle()
    assert cluster.plan_json["drain"] == []
    assert cluster.members() == ["job-w0", "job-w1", "job-w2"]


def test_cordoning_alone_drains_no_worker() -> None:
    cluster = a_running_job()
    before = cluster.version()
    cluster.nodes["c"]["spec"]["unschedulable"] = True
    cluster.taint("c", "node.kubernetes.io/unschedulable:NoSchedule")
    cluster.settle()
    assert cluster.version() == before


def test_a_spot_node_goes_and_comes_back() -> None:
    cluster = a_running_job()
    cluster.taint("c", SPOT_TAINT)
    cluster.settle()
    cluster.end("job-w2", Ending.LEFT)
    cluster.nodes.pop("c")
    cluster.settle()
    cluster.schedule()
    cluster.settle()
    assert cluster.status["state"] == "Degraded"
    assert cluster.status["ready"] == "2/3"
    cluster.with_nodes("c").schedule().run()
    cluster.settle()
    assert len(cluster.members()) == 3
    assert cluster.status["state"] == "Running"


def test_an_index_is_not_used_again_while_its_pod_exists() -> None:
    """The pod of a node without power stays Terminating: its name is taken, and it is not deleted by force."""
    cluster = FakeCluster(pool("a", maxReplicas=2)).with_nodes("a", "a2", cpu="1").start()
    assert cluster.members() == ["job-w0", "job-w1"]
    lost = cluster.pods["job-w1"]["spec"]["nodeName"]
    cluster.set_node(lost, "Unknown")
    cluster.pods["job-w1"]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    cluster.with_nodes("a3", cpu="1")
    cluster.settle()
    assert sorted(cluster.pods) == ["job-w0", "job-w1", "job-w2"]
    cluster.schedule().run("job-w2")
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w2"]


def test_an_unreachable_node_is_lost_at_once_and_counts_as_one_disruption() -> None:
    cluster = a_running_job()
    cluster.set_node("b", "Unknown")
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w2"]
    assert cluster.status["disruptions"] == 1
    cluster.pass_time(60)
    cluster.settle()
    assert cluster.status["disruptions"] == 1


def test_a_member_whose_pod_disappeared_counts_as_a_disruption() -> None:
    cluster = a_running_job()
    cluster.vanish("job-w1")
    cluster.settle()
    assert cluster.status["disruptions"] == 1
    assert "WorkerDisrupted" in cluster.events
