"""One pass over a job: limits, refusals, and what status and events report."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.grant import JobGrant
from heterotrain_operator.decide.job import decide
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.decide.objects import objects
from support.fake_cluster import FakeCluster, a_running_job, pool


def test_fewer_replicas_remove_the_least_preferred_without_counting_a_disruption() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=2), pool("b", maxReplicas=2)).with_nodes("a", "b").start()
    assert len(cluster.members()) == 4
    cluster.edit(lambda spec: spec.update(elasticPolicy={"minReplicas": 1, "maxReplicas": 3}))
    cluster.settle()
    leaving = [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]
    assert [cluster.pods[name]["spec"]["nodeName"] for name in leaving] == ["b"]
    assert cluster.plan_json["drain"] == leaving
    assert cluster.step().remove == (), "no pod is deleted twice"
    cluster.end(leaving[0], Ending.LEFT).vanish(leaving[0])
    cluster.settle()
    assert len(cluster.members()) == 3
    assert cluster.status["disruptions"] == 0


def test_a_plan_that_no_config_map_holds_is_one_clear_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting plan stays, because a longer one could never be read again. Here, a ConfigMap holds 6,000 bytes."""
    monkeypatch.setattr(objects, "MOST_PLAN_CHARACTERS", 6000)
    cluster = FakeCluster(pool("a", maxReplicas=3, numProcPerWorker=16)).with_nodes("a")
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()
    assert cluster.members() == []
    assert cluster.condition("Reconciling") == ("True", "WriteRejected")
    message = cluster.message("Reconciling")
    assert message.startswith("the plan of 48 ranks is too large for a ConfigMap: about ")
    assert "ranks fit, so lower elasticPolicy.maxReplicas" in message
    fit = int(message.split("about ")[1].split()[0])
    cluster.edit(lambda spec: spec["workerPools"][0].update(numProcPerWorker=fit // 3 - 1))
    for name in list(cluster.pods):
        cluster.end(name, exit_code=137).vanish(name)
    cluster.pass_time(60.0).settle()
    cluster.schedule().run()
    cluster.settle()
    assert cluster.condition("Reconciling")[0] == "False"
    assert len(cluster.members()) == 3


def test_a_refused_template_creates_no_pods_and_the_status_reports_why() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.acceptance = Acceptance(known=True, ok=False, reason="InvalidTemplate", message="unknown field imagee")
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.status["state"] == "Invalid"
    assert cluster.condition("Accepted") == ("False", "InvalidTemplate")
    assert cluster.condition("Stalled") == ("True", "InvalidTemplate")


def test_the_deadlines_of_a_refused_job_begin_when_it_is_accepted() -> None:
    """It uses no node and may still be corrected; afterwards, it has the whole time."""
    cluster = FakeCluster(spec={"preRunningDeadlineSeconds": 60, "activeDeadlineSeconds": 600})
    cluster.acceptance = Acceptance(known=True, ok=False, reason="PodsForbidden", message="by a policy")
    cluster.settle()
    cluster.pass_time(10_000)
    cluster.settle()
    assert (cluster.status["state"], cluster.status.get("startTime")) == ("Invalid", None)
    cluster.acceptance = Acceptance(known=True)
    cluster.settle()
    cluster.pass_time(59)
    cluster.settle()
    assert cluster.condition("Failed")[0] == "False"
    cluster.pass_time(2)
    cluster.settle()
    assert cluster.condition("Failed") == ("True", "PreRunningDeadlineExceeded")


def test_a_template_that_is_refused_later_keeps_running_workers_and_creates_none() -> None:
    cluster = a_running_job()
    cluster.acceptance = Acceptance(known=True, ok=False, reason="InvalidTemplate", message="unknown field imagee")
    cluster.taint("c", "aws-node-termination-handler/spot-itn:NoSchedule")
    cluster.settle()
    assert cluster.plan_json["drain"] == ["job-w2"], "an announced loss is still passed on"
    cluster.end("job-w2", Ending.LEFT)
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w1"]
    assert sorted(cluster.pods) == ["job-w0", "job-w1"]
    assert cluster.condition("Accepted") == ("False", "InvalidTemplate")
    assert cluster.condition("Running") == ("True", "Training")
    assert "unknown field imagee" in cluster.message("Degraded")


def test_whether_a_template_is_valid_may_be_unknown_for_a_while() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.acceptance = Acceptance(known=False, ok=False, reason="DryRunFailed", message="webhook did not answer")
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.condition("Accepted") == ("Unknown", "DryRunFailed")
    assert cluster.status["state"] == "Pending"
    assert "webhook did not answer" in cluster.status["reason"]


def test_pods_that_only_carry_the_job_s_labels_are_left_alone_and_keep_their_names() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.step()
    orphan = cluster.pods["job-w0"]
    orphan["metadata"]["ownerReferences"] = []
    orphan["status"]["phase"] = "Failed"
    copied = cluster.pods["job-w1"]
    copied["metadata"]["ownerReferences"][0]["uid"] = "the uid of a job of the same name before"
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()
    assert {"job-w0", "job-w1"} <= set(cluster.pods), "the operator does not own them"
    assert sorted(cluster.members()) == ["job-w2", "job-w3", "job-w4"]
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (0, 0)


def test_other_refusals_of_the_server_are_reported_while_training_goes_on() -> None:
    cluster = a_running_job()
    cluster.blocked = "services is forbidden"
    cluster.settle()
    assert cluster.condition("Running") == ("True", "Training")
    assert cluster.condition("Ready") == ("False", "WriteRejected")
    assert cluster.condition("Reconciling") == ("True", "WriteRejected")
    assert cluster.events.count("WriteRejected") == 1
    cluster.blocked = ""
    cluster.settle()
    assert cluster.condition("Ready") == ("True", "Training")


def test_a_contradictory_spec_is_refused_even_if_the_server_accepted_it() -> None:
    cluster = FakeCluster(spec={"elasticPolicy": {"minReplicas": 5, "maxReplicas": 2}})
    cluster.settle()
    assert cluster.condition("Accepted") == ("False", "InvalidSpec")
    assert "minReplicas" in cluster.status["reason"]


def test_a_job_that_nobody_would_start_is_refused_in_a_sentence() -> None:
    cluster = FakeCluster(spec={"managedBy": "kueue.x-k8s.io/multikueue"}).with_nodes("a")
    cluster.settle()
    assert cluster.condition("Accepted") == ("False", "InvalidSpec")
    assert "MultiKueue does not know HeteroTrainJobs" in cluster.message("Accepted")
    assert cluster.pods == {}


def test_a_job_that_is_being_deleted_gets_nothing_new() -> None:
    cluster = a_running_job()
    cluster.job["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    cluster.vanish("job-w0")
    decision = decide(cluster.observe())
    assert (decision.create, decision.plan, decision.status) == ((), None, None)


def test_an_image_that_cannot_be_pulled_is_reported_with_the_kubelet_s_message() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c")
    cluster.settle()
    cluster.schedule()
    for body in cluster.pods.values():
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        body["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
    cluster.settle()
    assert cluster.condition("Running") == ("False", "ImagePullBackOff")
    assert cluster.condition("Stalled") == ("True", "ImagePullBackOff")
    assert "no such image" in cluster.status["reason"]
    assert "WorkerCannotStart" in cluster.events


def test_a_worker_that_does_not_start_for_unknown_reasons_is_named() -> None:
    cluster = FakeCluster(pool("a")).with_nodes("a")
    cluster.settle()
    assert cluster.message("Scheduled").endswith(
        "; job-w0 is waiting: see `kubectl describe pod job-w0` for the cause"
    ), "the scheduler it names may not exist"
    cluster.schedule()
    cluster.settle()
    assert cluster.message("Running") == (
        "0 workers are ready; job-w0 is starting: see `kubectl describe pod job-w0` for the cause"
    ), "only events report a missing volume"


def test_the_price_is_the_sum_over_placed_workers() -> None:
    cluster = FakeCluster(pool("a", pricePerHour="3.67"), pool("b", pricePerHour="0.11")).with_nodes("a").start()
    assert cluster.status["pricePerHour"] == "3.67"


def test_a_sidecar_that_never_ends_does_not_keep_the_job_running() -> None:
    """Only the end of the training container counts, whatever else runs in the pod (a mesh sidecar)."""
    cluster = a_running_job()
    for name in cluster.members():
        cluster.end(name, Ending.FINISHED)
        cluster.pods[name]["spec"]["containers"].append({"name": "sidecar"})
        cluster.pods[name]["status"]["phase"] = "Running"
    cluster.settle()
    assert cluster.status["state"] == "Succeeded"
    assert all("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())


def test_times_of_conditions_move_only_when_they_flip() -> None:
    cluster = a_running_job()
    before = {c["type"]: c["lastTransitionTime"] for c in cluster.status["conditions"]}
    cluster.pass_time(500)
    cluster.vanish("job-w1")
    cluster.settle()
    after = {c["type"]: c["lastTransitionTime"] for c in cluster.status["conditions"]}
    assert {kind for kind in after if after[kind] != before[kind]} == {"Degraded"}


def test_the_start_is_published_once_however_many_passes_there_are() -> None:
    cluster = a_running_job()
    for _ in range(3):
        cluster.pass_time(100)
        cluster.step()
    assert cluster.events.count("TrainingStarted") == 1
    assert cluster.events.count("WorkersCreated") == 1


@pytest.mark.parametrize(("ready", "least"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_a_drain_may_always_take_one_on_demand_worker_and_any_spot_worker(ready: int, least: int) -> None:
    """A budget that never allows an eviction would block the drain of a node for ever."""
    cluster = FakeCluster(pool("a", maxReplicas=3), pool("c", capacityType="Spot")).with_nodes("a", "c", cpu="8")
    cluster.start()
    for index in range(ready, 3):
        cluster.set_ready(f"job-w{index}", ready=False)
    budget = next(body for body in cluster.step().apply if body["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == least
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["spec"]["selector"]["matchLabels"][keys.LABEL_CAPACITY_TYPE] == "OnDemand"


def test_a_job_has_no_budget_before_its_first_members() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3)).with_nodes("a", cpu="8")
    cluster.settle()
    cluster.schedule().run(ready=False)
    assert cluster.step().apply == ()
    cluster.set_ready("job-w0")
    cluster.pass_time(120)
    assert [body["kind"] for body in cluster.settle().apply] == ["PodDisruptionBudget"]
    cluster.edit(lambda spec: spec.update(suspend=True))
    cluster.settle()
    cluster.edit(lambda spec: spec.update(suspend=False))
    assert [body["kind"] for body in cluster.step().apply] == ["PodDisruptionBudget"], "the old one falls"


def test_workers_that_the_scheduler_has_not_answered_yet_are_no_warning() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3), spec={"elasticPolicy": {"minReplicas": 2}}).with_nodes("a", cpu="8")
    cluster.grant = JobGrant(limits={"a": 2}, reason="starts with 2 a: speeds are not known yet")
    cluster.settle()
    assert cluster.condition("Scheduled") == ("False", "Scheduling")
    assert "WorkersUnschedulable" not in cluster.events
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    cluster.pods["job-w1"]["status"] = {"phase": "Pending", "conditions": [refused]}
    cluster.settle()
    assert cluster.condition("Scheduled") == ("False", "Unschedulable")
    assert "WorkersUnschedulable" in cluster.events


def test_the_budget_falls_when_all_pools_become_spot() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=3)).with_nodes("a").start()
    assert cluster.settle().apply[0]["spec"]["minAvailable"] == 2
    cluster.edit(lambda spec: spec["workerPools"][0].update(capacityType="Spot", maxReplicas=1))
    budgets = [cluster.step().apply for _ in range(3)]
    assert budgets[-1], "workers of the earlier kind are left"
    assert budgets[-1][0]["spec"]["minAvailable"] == 0


def test_a_job_on_spot_nodes_only_has_no_budget() -> None:
    cluster = FakeCluster(pool("c", capacityType="Spot")).with_nodes("c").start()
    decision = cluster.settle()
    assert decision.active
    assert decision.apply == ()


def test_a_worker_behind_scheduling_gates_is_reported_as_such() -> None:
    cluster = FakeCluster(pool("a")).with_nodes("a")
    cluster.settle()
    (name,) = cluster.pods
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "non-empty gates"}
    cluster.pods[name]["status"] = {"phase": "Pending", "conditions": [gated]}
    cluster.settle()
    assert cluster.condition("Scheduled") == ("False", "SchedulingGated")
    assert f"{name}: its scheduling gates wait" in cluster.message("Scheduled")


QUEUE = {"kueue.x-k8s.io/queue-name": "training"}
GATE = "kueue.x-k8s.io/admission"


def queued_cluster(**spec: Any) -> FakeCluster:
    """Return a job with a queue's label on two nodes, whose new pods get Kueue's gate."""
    template = {"metadata": {"labels": QUEUE}, "spec": {"containers": [{"name": "trainer", "image": "x"}]}}
    return FakeCluster(pool("a", maxReplicas=2), template=template, spec=spec).with_nodes("a", cpu="2")


def gate(cluster: FakeCluster) -> None:
    for body in cluster.pods.values():
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "waits for gates"}
        body["spec"]["schedulingGates"] = [{"name": GATE}]
        body["status"] = {"phase": "Pending", "conditions": [gated]}


def test_pods_in_a_queue_wait_behind_its_gate_and_train_once_they_are_admitted() -> None:
    cluster = queued_cluster()
    cluster.settle()
    gate(cluster)
    before = set(cluster.pods)
    cluster.now_s += 3600.0
    assert cluster.settle().remove == ()
    assert set(cluster.pods) == before, "gated pods are neither replaced nor removed"
    assert all(QUEUE.items() <= body["metadata"]["labels"].items() for body in cluster.pods.values())
    assert cluster.condition("Scheduled") == ("False", "SchedulingGated")
    assert GATE in cluster.message("Scheduled")
    assert cluster.status["state"] == "Pending"
    for body in cluster.pods.values():
        del body["spec"]["schedulingGates"]
        body["status"] = {"phase": "Pending"}
    cluster.schedule().run()
    cluster.settle()
    assert cluster.status["state"] == "Running"


def test_a_job_with_a_part_of_its_pods_admitted_trains_with_these() -> None:
    cluster = queued_cluster()
    cluster.settle()
    gate(cluster)
    del cluster.pods["job-w0"]["spec"]["schedulingGates"]
    cluster.pods["job-w0"]["status"] = {"phase": "Pending"}
    cluster.pods["job-w0"]["spec"]["nodeName"] = "a"
    cluster.run("job-w0")
    cluster.now_s += 60.0
    cluster.settle()
    assert cluster.status["state"] == "Degraded", "it trains, with one of two"
    assert cluster.condition("Degraded") == ("True", "SchedulingGated")
    assert f"1 of 2 workers train; job-w1: its scheduling gates {GATE} wait" in cluster.message("Degraded")
    assert [member["worker"] for member in cluster.plan_json["ranks"]] == ["job-w0"]
    assert set(cluster.pods) == {"job-w0", "job-w1"}


def test_a_suspended_job_of_a_queue_gives_its_pods_up_and_gets_labelled_ones_again() -> None:
    cluster = queued_cluster()
    cluster.settle()
    gate(cluster)
    cluster.job["spec"]["suspend"] = True
    cluster.settle()
    assert cluster.pods == {}
    cluster.job["spec"]["suspend"] = False
    cluster.settle()
    assert len(cluster.pods) == 2
    assert all(QUEUE.items() <= body["metadata"]["labels"].items() for body in cluster.pods.values())


def test_claims_of_devices_that_nobody_can_meet_are_named_with_their_pool_and_cause_no_loop() -> None:
    """The nodes look free, because devices are not seen beforehand: after some seconds one pod of the pool waits."""
    claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
    cluster = FakeCluster(pool("a"), pool("b", maxReplicas=4, template={"spec": claims})).with_nodes("a", "b")
    cluster.settle()
    cluster.schedule().run().settle()
    for _ in range(3):
        cluster.pass_time(60.0).schedule().settle()
        for name in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
            cluster.vanish(name)
        cluster.settle()
    assert len(cluster.members()) == 1, "the pool without claims trains"
    waiting = [body for body in cluster.pods.values() if body["metadata"]["labels"][keys.LABEL_POOL] == "b"]
    assert len(waiting) == 1
    message = cluster.message("Degraded")
    assert "pool b: 0/3 nodes are available: 3 cannot allocate all claims" in message
    assert "too few free devices" in message
    before = sorted(cluster.pods)
    for _ in range(5):
        cluster.pass_time(60.0).schedule().settle()
    assert sorted(cluster.pods) == before
