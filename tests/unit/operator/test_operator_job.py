"""One pass over one job, told as stories: what exists, what happens, what the operator makes of it."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.job import decide
from heterotrain_operator.decide.lifecycle import Acceptance
from operator_world import World, pool

SPOT_NOTICE = "aws-node-termination-handler/spot-itn:NoSchedule"


def a_running_job(**spec: object) -> World:
    return World(spec=dict(spec)).with_nodes("a", "b", "c").start()


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


def test_own_failures_count_and_wait_longer_and_longer() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="ValueError: no such file")
    decision = world.step()
    assert world.status["restarts"] == 1
    assert world.status["lastFailure"] == "job-w0: ValueError: no such file"
    assert decision.create == ()
    assert decision.again_s == pytest.approx(2.0)
    world.pass_time(2)
    assert [body["metadata"]["name"] for body in world.step().create] == ["job-w3"]
    world.schedule().run()
    world.settle()
    world.end("job-w3", Ending.FAILED, exit_code=1, reason="again")
    assert world.step().again_s == pytest.approx(4.0)
    assert world.status["restarts"] == 2


def test_a_failed_pod_stays_for_its_log_and_is_counted_once() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    for _ in range(5):
        world.pass_time(10)
        world.step()
    assert "job-w0" in world.pods
    assert world.status["restarts"] == 1


def test_beyond_the_backoff_limit_the_job_fails_with_the_last_reason() -> None:
    world = a_running_job(backoffLimit=0)
    world.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    world.settle()
    assert world.status["state"] == "Failed"
    assert world.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "boom" in world.status["reason"]
    assert world.condition("Stalled") == ("True", "BackoffLimitExceeded")
    assert world.status["completionTime"]


def test_a_worker_that_is_killed_at_once_is_not_replaced_at_once() -> None:
    """Whatever killed it may go on killing: without a pause, workers would be made and killed in a hot loop."""
    world = a_running_job()
    world.pass_time(3)
    world.end("job-w0", exit_code=137)
    decision = world.step()
    assert decision.create == ()
    assert decision.again_s == pytest.approx(10.0)
    assert "job-w0" in world.pods
    world.pass_time(11)
    world.settle()
    assert sorted(world.pods) == ["job-w1", "job-w2", "job-w3"]


def test_disruptions_never_fail_a_job() -> None:
    world = a_running_job(backoffLimit=0)
    for _ in range(4):
        name = world.members()[0]
        world.end(name, exit_code=137, pod_reason="NodeShutdown")
        world.settle()
        world.pass_time(30)
        world.settle()
        world.schedule().run()
        world.settle()
    assert world.status["disruptions"] == 4
    assert world.status["restarts"] == 0
    assert world.status["state"] == "Running"


def test_finished_workers_end_the_job() -> None:
    world = a_running_job()
    for name in world.members():
        world.end(name, Ending.FINISHED, reason="7 epochs are committed")
    world.settle()
    assert world.status["state"] == "Succeeded"
    assert world.condition("Succeeded") == ("True", "Finished")
    assert world.condition("Ready") == ("True", "Finished")
    assert world.status["progress"] == "100%"
    assert sorted(world.pods) == ["job-w0", "job-w1", "job-w2"], "ended pods stay for their logs"


def test_exit_code_zero_alone_is_no_success() -> None:
    world = a_running_job()
    for name in world.members():
        world.end(name, exit_code=0)
    world.settle()
    assert world.status["state"] != "Succeeded"
    assert world.status["restarts"] == 3
    assert "heterotrain-run" in world.status["lastFailure"]


def test_a_straggler_gets_a_moment_after_the_first_has_finished() -> None:
    world = a_running_job()
    world.end("job-w0", Ending.FINISHED)
    world.settle()
    assert world.status["state"] == "Running"
    assert world.status["disruptions"] == 0
    world.pass_time(31)
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_no_worker_is_made_once_training_is_over() -> None:
    world = World(spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", "b").start()
    world.end("job-w0", Ending.FINISHED)
    world.with_nodes("c")
    assert "job-w2" in world.pods
    world.settle()
    assert "job-w2" not in world.pods


@pytest.mark.parametrize(
    ("policy", "left"),
    [("None", ["job-w0", "job-w1", "job-w2"]), ("Running", ["job-w0", "job-w1", "job-w2"]), ("All", [])],
)
def test_clean_pod_policy_for_ended_pods(policy: str, left: list[str]) -> None:
    world = a_running_job(cleanPodPolicy=policy)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.settle()
    assert sorted(world.pods) == left


@pytest.mark.parametrize(("policy", "deleting"), [("None", False), ("Running", True), ("All", True)])
def test_clean_pod_policy_for_pods_that_still_run(policy: str, deleting: bool) -> None:
    world = a_running_job(cleanPodPolicy=policy, backoffLimit=0)
    world.end("job-w0", Ending.FAILED, exit_code=1)
    world.settle()
    assert ("deletionTimestamp" in world.pods["job-w1"]["metadata"]) is deleting


def test_time_to_live_deletes_the_job_after_its_end_is_in_the_status() -> None:
    world = a_running_job(ttlSecondsAfterFinished=60)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.settle()
    assert not world.deleted_job
    world.pass_time(61)
    world.step()
    assert world.deleted_job


def test_a_time_to_live_of_zero_still_reports_the_end_first() -> None:
    world = a_running_job(ttlSecondsAfterFinished=0)
    for name in world.members():
        world.end(name, Ending.FINISHED)
    world.step()
    assert not world.deleted_job
    assert world.status["completionTime"]
    world.step()
    assert world.deleted_job


def test_suspend_removes_all_workers_and_resume_goes_on_above_the_old_plan() -> None:
    world = a_running_job()
    version = world.version()
    world.edit(lambda spec: spec.update(suspend=True))
    world.settle()
    assert all("deletionTimestamp" in body["metadata"] for body in world.pods.values())
    assert world.condition("Ready") == ("False", "Suspended")
    for name in list(world.pods):
        world.end(name, Ending.LEFT)
        world.vanish(name)
    world.settle()
    assert world.status["state"] == "Suspended"
    assert world.condition("Ready") == ("True", "Suspended")
    assert "startTime" not in world.status
    world.edit(lambda spec: spec.update(suspend=False)).pass_time(100)
    world.start()
    assert world.version()[0] == version[0] + 1
    assert world.status["state"] == "Running"
    assert world.status["disruptions"] == 0
    assert world.status["restarts"] == 0
    assert world.notices.count("Resumed") == 1


def test_the_deadline_counts_from_the_start() -> None:
    world = a_running_job(activeDeadlineSeconds=100)
    world.pass_time(101)
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")


def test_a_job_that_never_begins_fails_by_its_own_deadline_and_one_that_began_does_not() -> None:
    waiting = World(spec={"preRunningDeadlineSeconds": 50})
    waiting.settle()
    waiting.pass_time(51)
    waiting.settle()
    assert waiting.condition("Failed") == ("True", "PreRunningDeadlineExceeded")
    running = a_running_job(preRunningDeadlineSeconds=50)
    running.pass_time(51)
    running.settle()
    assert running.status["state"] == "Running"


def test_a_deleted_plan_is_made_again_higher_with_the_same_members() -> None:
    world = a_running_job()
    version, members = world.version(), world.members()
    world.plan = None
    world.settle()
    assert world.version() > version
    assert world.members() == members


@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}', "[]"])
def test_a_damaged_plan_is_made_again_higher(text: str) -> None:
    world = a_running_job()
    version = world.version()
    assert world.plan is not None
    world.plan["data"][keys.PLAN_KEY] = text
    world.settle()
    assert world.version() > version


def test_an_older_plan_put_back_by_somebody_is_replaced_above_the_newest() -> None:
    world = World().with_nodes("a", "b").start()
    assert world.plan is not None
    old = world.plan["data"][keys.PLAN_KEY]
    world.with_nodes("c").schedule().run()
    world.settle()
    newest = world.version()
    world.plan["data"][keys.PLAN_KEY] = old
    world.settle()
    assert world.version() > newest


def test_an_older_plan_that_only_differs_in_its_version_is_replaced_too() -> None:
    """Workers that hold the newer version refuse it, newcomers would not: they have to hear of one version."""
    world = a_running_job()
    assert world.plan is not None
    old = world.plan["data"][keys.PLAN_KEY]
    world.taint("c", SPOT_NOTICE)
    world.settle()
    world.nodes["c"]["spec"]["taints"].clear()
    world.settle()
    newest = world.version()
    world.plan["data"][keys.PLAN_KEY] = old
    world.settle()
    assert world.version() > newest


def test_a_plan_lost_while_nobody_is_ready_waits_below_the_one_that_members_hold() -> None:
    """Generation 0 ranks below what running members hold, so they go on; newcomers learn that they have to wait."""
    world = a_running_job()
    revision = world.version()[1]
    for name in world.members():
        world.set_ready(name, ready=False)
    world.plan = None
    world.settle()
    assert world.version() == (0, revision + 1)
    world.edit(lambda spec: spec.update(elasticPolicy={"minReplicas": 2}))
    world.settle()
    assert world.version() == (0, revision + 2), "a change of the spec does not lift it above them"
    for name in ("job-w0", "job-w1", "job-w2"):
        world.set_ready(name)
    world.settle()
    assert world.version()[0] == 2


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
