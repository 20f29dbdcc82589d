"""Operator, image and stored objects one version apart, in either direction.

Training goes on, or one condition names the image to change; nothing is charged to the job. ``stored/`` holds what the
version before wrote; a newer version is imitated by fields and values that this one does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from heterotrain.identity import read_config, read_identity
from heterotrain_core.contract import env, keys, metrics
from heterotrain_core.contract.choices import Precision
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.config import TrainingConfig, UnknownSettingError, decode_config, encode_config
from heterotrain_core.contract.outcome import Cause, Ending, decode_outcome
from heterotrain_core.contract.plan import SCHEMA_VERSION, Plan
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample
from support.fake_cluster import FakeCluster, a_running_job

Body = dict[str, Any]
STORED = Path(__file__).parent / "stored"


def stored(name: str) -> Any:
    return json.loads((STORED / f"{name}.json").read_text())


def upgraded_cluster() -> FakeCluster:
    """Return the cluster that an operator of the version before has left, with its job in training."""
    cluster = FakeCluster()
    cluster.job, cluster.plan = stored("job"), stored("plan")
    cluster.pods = {body["metadata"]["name"]: body for body in stored("pods")}
    cluster.nodes = {body["metadata"]["name"]: body for body in stored("nodes")}
    return cluster


def test_an_upgrade_of_the_operator_changes_no_member_of_a_running_job() -> None:
    """Only the boundary and the probes of the first epoch may follow defaults that have changed."""
    cluster = upgraded_cluster()
    plan, pods = decode_plan(json.dumps(cluster.plan_json), job_uid="job-uid"), sorted(cluster.pods)
    cluster.settle()
    now = decode_plan(json.dumps(cluster.plan_json), job_uid="job-uid")
    assert isinstance(plan, Plan)
    assert isinstance(now, Plan)
    assert (now.generation, now.members, now.ranks) == (plan.generation, plan.members, plan.ranks), "no rank pauses"
    assert sorted(cluster.pods) == pods
    assert not any("deletionTimestamp" in body["metadata"] for body in cluster.pods.values())
    assert cluster.status["state"] == "Running"
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (2, 0)
    assert cluster.status["step"] == 120
    assert not [event for event in cluster.events if event in ("WorkerFailed", "Degraded", "TrainingInterrupted")]


def test_a_loss_after_an_upgrade_is_handled_as_before() -> None:
    cluster = upgraded_cluster()
    before = cluster.version()
    cluster.vanish("job-w2").settle()
    assert cluster.version()[0] == before[0] + 1
    assert cluster.members() == ["job-w0", "job-w1"]
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (2, 1)


def newer_status(cluster: FakeCluster) -> None:
    cluster.job["status"] |= {"weather": "fine", "step": 120, "state": "Hibernating"}
    cluster.job["status"]["internal"] |= {"cost": {"currency": "EUR"}, "epochs": [1]}
    cluster.job["status"]["conditions"].append({"type": "Brandnew", "status": "Maybe"})


def newer_pods(cluster: FakeCluster) -> None:
    for body in cluster.pods.values():
        body["metadata"]["annotations"]["heterotrain.dev/aura"] = "blue"
        body["spec"]["containers"][0]["env"].append({"name": "HETEROTRAIN_NEW", "value": "1"})


def newer_schema(cluster: FakeCluster) -> None:
    assert cluster.plan is not None
    plan = json.loads(cluster.plan["data"][keys.PLAN_KEY]) | {"schema": SCHEMA_VERSION + 1, "tides": [1, 2]}
    cluster.plan["data"][keys.PLAN_KEY] = json.dumps(plan)


@pytest.mark.parametrize("change", [newer_status, newer_pods, newer_schema])
def test_a_rollback_of_the_operator_charges_nothing(change: Callable[[FakeCluster], None]) -> None:
    """What the newer operator wrote is left out where it is not known; an unreadable plan is written again, newer."""
    cluster = upgraded_cluster()
    before = cluster.version()
    change(cluster)
    for _ in range(2):
        cluster.settle()
        cluster.schedule().run()
    assert cluster.status["state"] == "Running"
    assert (cluster.status["restarts"], cluster.status["disruptions"]) == (2, 0)
    assert sorted(cluster.pods) == ["job-w0", "job-w1", "job-w2"]
    assert cluster.version() >= before
    assert isinstance(decode_plan(json.dumps(cluster.plan_json), job_uid="job-uid"), Plan | Refused)


def test_an_older_image_reads_the_configuration_of_a_job_without_new_settings() -> None:
    """Fields with their default are not written, so the version before sees only fields that it has."""
    cluster = a_running_job()
    main = cluster.pods["job-w0"]["spec"]["containers"][0]
    text = next(each["value"] for each in main["env"] if each["name"] == env.CONFIG)
    assert set(json.loads(text)) <= set(stored("config"))


def test_this_image_reads_the_configuration_of_the_operator_before() -> None:
    """A setting that this image no longer has is null there: the job does not ask for it."""
    found = decode_config(json.dumps(stored("config")))
    old = {name: value for name, value in stored("config").items() if hasattr(found, name) or value is not None}
    assert {field.name: getattr(found, field.name) for field in fields(found) if field.name in old} == old
    assert decode_config(encode_config(found)) == found


def test_no_default_of_a_setting_has_changed() -> None:
    """A default that is left out means the same in both versions."""
    plain = TrainingConfig()
    written = {"epochs", "base_batch_samples", "seed", "grace_s", "peer_timeout_s"}  # always from the spec
    for name, value in stored("config").items():
        if name not in written:
            assert getattr(plain, name, None) == value, name


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"quantum": True}, "quantum"),
        ({"precision": "FP4"}, "precision: FP4"),
        ({"on_divergence": "Pray"}, "Pray"),
        ({"encryption": "TLS"}, "encryption"),
        ({"checkpoint_max_age_s": 60.0}, "checkpoint_max_age_s"),
    ],
)
def test_a_setting_that_the_image_lacks_names_the_image_to_change(
    extra: Body, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To leave the setting out would train something else; the outcome says what to do, before anything is loaded."""
    from heterotrain import job_setup  # noqa: PLC0415  # loads PyTorch, which other tests of this file do not need
    from heterotrain.errors import VersionMismatch  # noqa: PLC0415  # the same

    text = json.dumps({"epochs": 2, **extra})
    with pytest.raises(UnknownSettingError, match=named):
        decode_config(text)
    outcome = tmp_path / "outcome"
    for name, value in {
        env.JOB_UID: "u", env.WORKER: "w", env.WORKER_UID: "wu", env.WORKER_ADDRESS: "1.2.3.4", env.CONFIG: text,
        env.TERMINATION_PATH: str(outcome),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(VersionMismatch, match="use an image of the operator's version"):
        job_setup.operator_config(read_identity())
    found = decode_outcome(outcome.read_text())
    assert found is not None
    assert (found.ending, found.cause) == (Ending.FAILED, Cause.VERSION_MISMATCH)
    with pytest.raises(VersionMismatch):
        read_config()


def test_an_image_that_does_not_fit_is_one_condition_and_no_failure() -> None:
    cluster = a_running_job(backoffLimit=0)
    for _ in range(5):
        for name, body in cluster.pods.items():
            if body["status"]["phase"] == "Running":
                cluster.end(
                    name, Ending.FAILED, exit_code=1, reason="this image does not know quantum: use an image",
                    cause=Cause.VERSION_MISMATCH,
                )  # fmt: skip
        cluster.settle()
        assert cluster.condition("Stalled") == ("True", "VersionMismatch")
        assert "(its image is image); this counts as no failure" in cluster.message("Stalled")
        cluster.pass_time(61).settle()
        cluster.schedule().run(ready=False)
        cluster.settle()
    assert (cluster.status["restarts"], cluster.status["state"]) == (0, "Restarting")
    assert "WorkerFailed" not in cluster.events
    cluster.edit(lambda spec: spec["template"]["spec"]["containers"][0].update(image="newer"))
    for name in list(cluster.pods):
        if cluster.pods[name]["status"]["phase"] == "Running":
            cluster.vanish(name)
    cluster.settle()
    cluster.pass_time(61).settle()
    cluster.schedule().run()
    cluster.settle()
    assert cluster.status["state"] == "Running"
    assert cluster.condition("Stalled")[0] == "False"


def test_workers_that_do_not_fit_are_not_created_again_at_once() -> None:
    cluster = a_running_job()
    for name in list(cluster.pods):
        cluster.end(name, Ending.FAILED, exit_code=1, cause=Cause.VERSION_MISMATCH)
    cluster.settle()
    number = len(cluster.pods)
    cluster.pass_time(30).settle()
    assert len(cluster.pods) == number
    cluster.pass_time(31).settle()
    assert len(cluster.pods) == number + 3


@pytest.mark.parametrize(
    ("reads", "reason"), [(SCHEMA_VERSION - 1, "VersionMismatch"), (SCHEMA_VERSION, "WaitingForBoundary")]
)
def test_an_image_that_cannot_read_the_plan_is_named(reads: int, reason: str) -> None:
    cluster = a_running_job()
    gauges = {
        MemberId(view.uid, 0): MemberGauges(worker=view.name, generation=1, revision=0, plan_schema=reads)
        for view in cluster.pod_views
    }
    cluster.telemetry = replace(Telemetry(), gauges=gauges, newest_sample_s=cluster.now_s)
    cluster.learns = False
    cluster.settle()
    assert cluster.condition("PlanApplied") == ("False", reason)
    assert ("training goes on with plan 1.0 until the image" in cluster.message("PlanApplied")) == (
        reason == "VersionMismatch"
    )


def test_the_schema_that_an_image_reads_is_taken_from_its_metrics() -> None:
    labels = {"__name__": metrics.PLAN_SCHEMA, "worker": "w", "worker_uid": "u", "local_rank": "0"}
    (telling,) = parse_everything([VectorSample(labels, 7)]).gauges.values()
    assert telling.plan_schema == 7


def test_outcomes_of_both_neighbours_are_read() -> None:
    old = stored("outcome")
    found = decode_outcome(json.dumps(old))
    assert found is not None
    assert (found.ending, found.step, found.cause) == (Ending.FINISHED, 120, None)
    newer = decode_outcome(json.dumps({**old, "cause": "Brandnew", "carbon": 3}))
    assert newer == found


def test_old_spellings_of_choices_stay_readable() -> None:
    assert decode_config(json.dumps({"precision": "bf16"})).precision == "bf16"
    assert Precision("bf16") is Precision.BF16
