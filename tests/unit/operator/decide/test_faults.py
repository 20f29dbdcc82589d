"""An unexpected error in one part of a pass: the other parts decide as before, and the status reports it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.api.status import MAX_MESSAGE_LENGTH
from heterotrain_operator.decide import job as job_module
from heterotrain_operator.decide import next_plan
from heterotrain_operator.decide.faults import Fault
from heterotrain_operator.decide.plan.shares import share_out
from heterotrain_operator.decide.status import conditions, status
from support.fake_cluster import FakeCluster, a_running_job


def broken(*_: Any, **__: Any) -> Any:
    raise IndexError("list index out of range " * 100)


def break_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shares fail whenever there are measurements, as a bug in their mathematics would."""

    def shares_without_measurements(spec: Any, members: Any, telemetry: Any, *speeds: Any, **known: Any) -> Any:
        return share_out(spec, members, telemetry, *speeds, **known) if not telemetry.sequence else broken()

    monkeypatch.setattr(next_plan, "share_out", shares_without_measurements)


def assert_reported(cluster: FakeCluster, part: str) -> None:
    assert cluster.condition("Stalled") == ("True", "InternalError")
    assert cluster.condition("Ready") == ("False", "InternalError")
    assert cluster.condition("Reconciling") == ("False", "InternalError")
    message = cluster.message("Stalled")
    assert f"failed to compute {part} (IndexError: list index" in message
    assert "report it" in message
    assert len(message) <= 400 < MAX_MESSAGE_LENGTH


def with_measurements(cluster: FakeCluster) -> FakeCluster:
    cluster.telemetry = replace(cluster.telemetry, sequence=1)
    return cluster


def test_without_shares_a_lost_member_leaves_the_plan_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = with_measurements(a_running_job())
    break_shares(monkeypatch)
    cluster.end("job-w2", exit_code=137)
    decision = cluster.step()
    assert [fault.part for fault in decision.faults] == ["shares"]
    assert cluster.members() == ["job-w0", "job-w1"]
    assert [member["share_samples"] for member in cluster.plan_json["members"]] == [50, 50]
    assert cluster.status["disruptions"] == 1
    assert_reported(cluster, "shares")
    cluster.pass_time(60.0).settle()
    assert "job-w3" in cluster.pods


def test_without_progress_an_announced_loss_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_running_job()
    monkeypatch.setattr(status, "progress_fields", broken)
    cluster.pods["job-w2"]["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True"})
    cluster.settle()
    assert cluster.plan_json["drain"] == ["job-w2"]
    assert_reported(cluster, "its progress")


def test_an_error_of_the_learner_is_reported_until_it_has_learned_again() -> None:
    cluster = a_running_job()
    cluster.learns = False
    fault = Fault(part="shares", error=IndexError("list index out of range"), instead="training goes on")
    cluster.model = replace(cluster.model, fault=fault.sentence)
    assert not cluster.step().faults, "it is not this pass that failed"
    assert_reported(cluster, "shares")
    cluster.model = replace(cluster.model, fault="")
    cluster.step()
    assert cluster.condition("Ready") == ("True", "Training")
    assert cluster.condition("Stalled")[0] == "False"


@pytest.mark.parametrize(
    ("module", "name", "part"),
    [
        (status, "progress_fields", "its progress"),
        (status, "prediction_of", "its prediction"),
        (status, "batch_reason_of", "its batch"),
        (status, "_rows", "the workers' rows"),
        (status, "_pools", "its status"),
        (conditions, "speed_conditions", "conditions about speed"),
        (job_module, "events_of", "its events"),
        (job_module, "decide_replicas", "the number of workers"),
    ],
)
def test_any_other_part_may_fail_and_membership_is_still_decided(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, part: str
) -> None:
    cluster = a_running_job()
    cluster.end("job-w2", exit_code=137)
    monkeypatch.setattr(module, name, broken)
    decision = cluster.step()
    assert [fault.part for fault in decision.faults] == [part]
    assert cluster.members() == ["job-w0", "job-w1"]
    generation, _ = cluster.version()
    assert (cluster.status["disruptions"], cluster.status["plan"]["desired"].partition(".")[0]) == (1, str(generation))
    if name != "events_of":  # events follow from the status
        assert_reported(cluster, part)
    # Nothing is counted a second time afterwards.
    monkeypatch.undo()
    cluster.settle()
    assert (cluster.status["disruptions"], cluster.status["pools"][2]["disruptions"]) == (1, 1)


def test_a_job_ends_although_its_status_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = a_running_job()
    monkeypatch.setattr(status, "_state", broken)
    for name in cluster.pods:
        cluster.end(name, Ending.FINISHED)
    cluster.settle()
    assert cluster.condition("Succeeded")[0] == "True"
    assert (cluster.status["state"], cluster.condition("Stalled")[0]) == ("Succeeded", "False")
    assert cluster.status["completionTime"]
    monkeypatch.undo()
    cluster.settle()
    assert cluster.condition("Ready")[0] == "True"
