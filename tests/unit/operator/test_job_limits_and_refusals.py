"""One pass over a job: limits, refusals and what is told to people."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.job import decide
from heterotrain_operator.decide.lifecycle import Acceptance
from operator_world import World, a_running_job, pool


def test_fewer_replicas_remove_the_least_preferred_first_and_charge_nobody() -> None:
    world = World(pool("a", maxReplicas=2), pool("b", maxReplicas=2)).with_nodes("a", "b").start()
    assert len(world.members()) == 4
    world.edit(lambda spec: spec.update(elasticPolicy={"minReplicas": 1, "maxReplicas": 3}))
    world.settle()
    going = [name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"]]
    assert [world.pods[name]["spec"]["nodeName"] for name in going] == ["b"]
    assert world.plan_json["drain"] == going
    assert world.step().remove == (), "nobody is deleted twice"
    world.end(going[0], Ending.LEFT).vanish(going[0])
    world.settle()
    assert len(world.members()) == 3
    assert world.status["disruptions"] == 0


def test_a_refused_template_makes_no_pods_and_says_why() -> None:
    world = World().with_nodes("a", "b", "c")
    world.acceptance = Acceptance(known=True, ok=False, reason="InvalidTemplate", message="unknown field imagee")
    world.settle()
    assert world.pods == {}
    assert world.status["state"] == "Refused"
    assert world.condition("Accepted") == ("False", "InvalidTemplate")
    assert world.condition("Stalled") == ("True", "InvalidTemplate")


def test_a_template_that_is_refused_later_keeps_those_who_train_and_makes_nobody_new() -> None:
    world = a_running_job()
    world.acceptance = Acceptance(known=True, ok=False, reason="InvalidTemplate", message="unknown field imagee")
    world.taint("c", "aws-node-termination-handler/spot-itn:NoSchedule")
    world.settle()
    assert world.plan_json["drain"] == ["job-w2"], "an announced loss is still passed on"
    world.end("job-w2", Ending.LEFT)
    world.settle()
    assert world.members() == ["job-w0", "job-w1"]
    assert sorted(world.pods) == ["job-w0", "job-w1"]
    assert world.condition("Accepted") == ("False", "InvalidTemplate")
    assert world.condition("Running") == ("True", "Training")
    assert "unknown field imagee" in world.message("Degraded")


def test_whether_a_template_is_right_may_be_unknown_for_a_while() -> None:
    world = World().with_nodes("a", "b", "c")
    world.acceptance = Acceptance(known=False, ok=False, reason="NoAnswer", message="webhook did not answer")
    world.settle()
    assert world.pods == {}
    assert world.condition("Accepted") == ("Unknown", "NoAnswer")
    assert world.status["state"] == "Pending"
    assert "webhook did not answer" in world.status["reason"]


def test_pods_that_only_bear_the_job_s_labels_are_left_alone_and_keep_their_names() -> None:
    world = World().with_nodes("a", "b", "c")
    world.step()
    orphan = world.pods["job-w0"]
    orphan["metadata"]["ownerReferences"] = []
    orphan["status"]["phase"] = "Failed"
    copied = world.pods["job-w1"]
    copied["metadata"]["ownerReferences"][0]["uid"] = "the uid of a job of the same name before"
    world.settle()
    world.schedule().run()
    world.settle()
    assert {"job-w0", "job-w1"} <= set(world.pods), "they are not ours to delete"
    assert sorted(world.members()) == ["job-w2", "job-w3", "job-w4"]
    assert (world.status["restarts"], world.status["disruptions"]) == (0, 0)


def test_what_the_server_refuses_besides_pods_is_told_while_training_goes_on() -> None:
    world = a_running_job()
    world.blocked = "services is forbidden"
    world.settle()
    assert world.condition("Running") == ("True", "Training")
    assert world.condition("Ready") == ("False", "WriteRefused")
    assert world.condition("Reconciling") == ("True", "WriteRefused")
    assert world.notices.count("WriteRefused") == 1
    world.blocked = ""
    world.settle()
    assert world.condition("Ready") == ("True", "Training")


def test_a_spec_that_contradicts_itself_is_refused_whatever_let_it_through() -> None:
    world = World(spec={"elasticPolicy": {"minReplicas": 5, "maxReplicas": 2}})
    world.settle()
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert "minReplicas" in world.status["reason"]


def test_a_job_of_another_controller_is_left_alone() -> None:
    world = World(spec={"managedBy": "kueue.x-k8s.io/multikueue"}).with_nodes("a")
    decision = world.step()
    assert decision.status is None
    assert world.pods == {}


def test_a_job_that_is_being_deleted_gets_nothing_new() -> None:
    world = a_running_job()
    world.job["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    world.vanish("job-w0")
    decision = decide(world.observe())
    assert (decision.create, decision.plan, decision.status) == ((), None, None)


def test_an_image_that_can_t_be_pulled_is_told_with_the_kubelet_s_words() -> None:
    world = World().with_nodes("a", "b", "c")
    world.settle()
    world.schedule()
    for body in world.pods.values():
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        body["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
    world.settle()
    assert world.condition("Running") == ("False", "ImagePullBackOff")
    assert world.condition("Stalled") == ("True", "ImagePullBackOff")
    assert "no such image" in world.status["reason"]
    assert "WorkerCannotStart" in world.notices


def test_a_worker_of_which_nobody_says_why_it_does_not_start_is_named() -> None:
    world = World(pool("a")).with_nodes("a")
    world.settle()
    assert world.message("Scheduled").endswith("; job-w0 is waiting: kubectl describe pod job-w0 says what it needs"), (
        "the scheduler that it names may not exist"
    )
    world.schedule()
    world.settle()
    assert world.message("Running") == (
        "0 workers are ready; job-w0 is starting: kubectl describe pod job-w0 says what it needs"
    ), "a volume that is missing is told by Events only"


def test_the_price_adds_up_what_is_placed() -> None:
    world = World(pool("a", pricePerHour="3.67"), pool("b", pricePerHour="0.11")).with_nodes("a").start()
    assert world.status["pricePerHour"] == "3.67"


def test_a_sidecar_that_never_ends_does_not_keep_the_job_running() -> None:
    """The training container's end counts, whatever else runs in the pod (a mesh sidecar)."""
    world = a_running_job()
    for name in world.members():
        world.end(name, Ending.FINISHED)
        world.pods[name]["status"]["phase"] = "Running"
    world.settle()
    assert world.status["state"] == "Succeeded"
    assert all("deletionTimestamp" in body["metadata"] for body in world.pods.values())


def test_times_of_conditions_move_only_when_they_flip() -> None:
    world = a_running_job()
    before = {c["type"]: c["lastTransitionTime"] for c in world.status["conditions"]}
    world.pass_time(500)
    world.vanish("job-w1")
    world.settle()
    after = {c["type"]: c["lastTransitionTime"] for c in world.status["conditions"]}
    assert {kind for kind in after if after[kind] != before[kind]} == {"Degraded"}


def test_start_is_told_once_however_many_passes_there_are() -> None:
    world = a_running_job()
    for _ in range(3):
        world.pass_time(100)
        world.step()
    assert world.notices.count("TrainingStarted") == 1
    assert world.notices.count("WorkersCreated") == 1


@pytest.mark.parametrize(("ready", "least"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_a_drain_may_always_take_one_on_demand_worker_and_no_spot_worker_is_guarded(ready: int, least: int) -> None:
    """A budget that never lets anybody go would block a node's drain for ever."""
    world = World(pool("a", maxReplicas=3), pool("c", capacityType="spot")).with_nodes("a", "c", cpu="8")
    world.settle()
    world.schedule().run(ready=False)
    world.set_ready("job-w3")
    for index in range(ready):
        world.set_ready(f"job-w{index}")
    budget = next(body for body in world.step().apply if body["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == least
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["spec"]["selector"]["matchLabels"][keys.LABEL_CAPACITY_TYPE] == "on-demand"


def test_a_job_on_spot_nodes_only_has_no_budget() -> None:
    world = World(pool("c", capacityType="spot")).with_nodes("c")
    assert [body["kind"] for body in world.step().apply] == ["Service"]
