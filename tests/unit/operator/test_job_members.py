"""Who takes part in a job: workers that come, are announced to go, are lost and return, pass by pass on a cluster in memory."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from operator_world import World, a_running_job, pool

SPOT_NOTICE = "aws-node-termination-handler/spot-itn:NoSchedule"


def test_a_new_job_gets_a_waiting_plan_before_its_pods_and_a_worker_in_each_pool() -> None:
    world = World().with_nodes("a", "b", "c")
    decision = world.step()
    assert [body["kind"] for body in decision.apply] == ["Service", "PodDisruptionBudget"]
    assert world.version() == (0, 0)
    assert world.members() == []
    assert [body["spec"]["nodeSelector"] for body in decision.create] == [{"pool": "a"}, {"pool": "b"}, {"pool": "c"}]
    assert sorted(world.pods) == ["job-w0", "job-w1", "job-w2"]
    assert world.status["state"] == "Pending"


def test_ready_workers_become_generation_one_with_even_shares() -> None:
    world = a_running_job()
    assert world.version()[0] == 1
    assert world.members() == ["job-w0", "job-w1", "job-w2"]
    assert [member["share_samples"] for member in world.plan_json["members"]] == [34, 33, 33]
    assert world.status["state"] == "Running"
    assert world.condition("Ready") == ("True", "Training")
    assert world.status["ready"] == "3/3"


def test_every_running_pod_is_told_the_plan_s_version() -> None:
    world = a_running_job()
    versions = {body["metadata"]["annotations"][keys.ANNOTATION_PLAN] for body in world.pods.values()}
    assert versions == {"{}.{}".format(*world.version())}


def test_a_pool_without_room_delays_nothing() -> None:
    """Two of three pools have nodes: training starts with two workers, the third waits for its node."""
    world = World(spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", "b").start()
    assert world.members() == ["job-w0", "job-w1"]
    assert world.status["state"] == "Degraded"
    assert "pool c" in world.status["reason"]
    world.with_nodes("c").schedule().run()
    world.settle()
    assert world.members() == ["job-w0", "job-w1", "job-w2"]
    assert world.status["state"] == "Running"


def test_training_waits_below_the_minimum() -> None:
    world = World(spec={"elasticPolicy": {"minReplicas": 3}}).with_nodes("a", "b").start()
    assert world.version()[0] == 0
    assert world.status["state"] == "Pending"
    assert world.condition("Scheduled") == ("False", "Unschedulable")


def test_a_pool_s_own_minimum_has_to_be_there_before_training_starts() -> None:
    world = World(pool("a"), pool("b", minReplicas=1)).with_nodes("a").start()
    assert world.version()[0] == 0
    assert "below their minReplicas: b" in world.status["reason"]
    world.with_nodes("b").schedule().run()
    world.settle()
    assert world.members() == ["job-w0", "job-w1"]


def test_a_worker_is_not_named_before_it_is_ready() -> None:
    world = World().with_nodes("a", "b", "c")
    world.settle()
    world.schedule().run(ready=False)
    world.settle()
    assert world.version()[0] == 0
    assert world.status["state"] == "Starting"


def test_ready_workers_wait_a_moment_for_those_that_start_then_go_ahead() -> None:
    world = World().with_nodes("a", "b", "c")
    world.settle()
    world.schedule().run(ready=False)
    world.set_ready("job-w0")
    decision = world.step()
    assert world.version()[0] == 0
    assert decision.again_s == pytest.approx(5.0, abs=1.0)
    world.pass_time(6)
    world.settle()
    assert world.members() == ["job-w0"]


def test_a_loss_waits_for_nobody_and_takes_those_in_who_are_ready() -> None:
    world = World(pool("a"), pool("b"), pool("c"), pool("d")).with_nodes("a", "b").start()
    world.with_nodes("c", "d").schedule().run(ready=False)
    world.set_ready("job-w2")
    world.settle()
    assert world.members() == ["job-w0", "job-w1"], "the two that come are gathered"
    world.vanish("job-w1")
    world.settle()
    assert world.members() == ["job-w0", "job-w2"]


def test_readiness_lets_in_but_its_loss_throws_nobody_out() -> None:
    """A slow device answers its probe late; that is no reason to make everybody pause."""
    world = a_running_job()
    before = world.version()
    world.set_ready("job-w1", ready=False)
    world.settle()
    assert world.version() == before


def test_an_announced_loss_is_drained_then_left_out() -> None:
    world = a_running_job()
    generation, revision = world.version()
    world.taint("c", SPOT_NOTICE)
    world.settle()
    assert world.version() == (generation, revision + 1)
    assert world.plan_json["drain"] == ["job-w2"]
    assert world.status["state"] == "Resizing"
    assert world.message("Degraded").startswith("2 of 3 workers train on")
    world.end("job-w2", Ending.LEFT, reason="told to go")
    world.settle()
    assert world.version()[0] == generation + 1
    assert world.members() == ["job-w0", "job-w1"]
    assert world.plan_json["drain"] == []
    assert world.status["disruptions"] == 1
    assert world.status["restarts"] == 0


def test_an_announcement_that_is_taken_back_empties_the_drain_list() -> None:
    world = a_running_job()
    world.taint("c", SPOT_NOTICE)
    world.settle()
    world.nodes["c"]["spec"]["taints"].clear()
    world.settle()
    assert world.plan_json["drain"] == []
    assert world.members() == ["job-w0", "job-w1", "job-w2"]


def test_cordoning_alone_drains_nobody() -> None:
    world = a_running_job()
    before = world.version()
    world.nodes["c"]["spec"]["unschedulable"] = True
    world.taint("c", "node.kubernetes.io/unschedulable:NoSchedule")
    world.settle()
    assert world.version() == before


def test_a_spot_node_goes_and_comes_back() -> None:
    world = a_running_job()
    world.taint("c", SPOT_NOTICE)
    world.settle()
    world.end("job-w2", Ending.LEFT)
    world.nodes.pop("c")
    world.settle()
    world.schedule()
    world.settle()
    assert world.status["state"] == "Degraded"
    assert world.status["ready"] == "2/3"
    world.with_nodes("c").schedule().run()
    world.settle()
    assert len(world.members()) == 3
    assert world.status["state"] == "Running"


def test_an_index_is_not_used_again_while_its_pod_exists() -> None:
    """The pod of a node without power stays Terminating: its name is taken, and nobody deletes it by force."""
    world = World(pool("a", maxReplicas=2)).with_nodes("a", "a2", cpu="1").start()
    assert world.members() == ["job-w0", "job-w1"]
    lost = world.pods["job-w1"]["spec"]["nodeName"]
    world.set_node(lost, "Unknown")
    world.pods["job-w1"]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.with_nodes("a3", cpu="1")
    world.settle()
    assert sorted(world.pods) == ["job-w0", "job-w1", "job-w2"]
    world.schedule().run("job-w2")
    world.settle()
    assert world.members() == ["job-w0", "job-w2"]


def test_a_silent_node_is_lost_at_once_and_counts_as_a_disruption_once() -> None:
    world = a_running_job()
    world.set_node("b", "Unknown")
    world.settle()
    assert world.members() == ["job-w0", "job-w2"]
    assert world.status["disruptions"] == 1
    world.pass_time(60)
    world.settle()
    assert world.status["disruptions"] == 1


def test_a_member_whose_pod_vanished_unseen_is_a_disruption() -> None:
    world = a_running_job()
    world.vanish("job-w1")
    world.settle()
    assert world.status["disruptions"] == 1
    assert "WorkerDisrupted" in world.notices
