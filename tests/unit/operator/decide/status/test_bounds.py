"""Whatever telemetry, outcomes and old values hold, the status passes the API models and the schema of the CRD."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import LATEST_S, Ending, decode_outcome
from heterotrain_operator.api.crd import crd
from heterotrain_operator.api.status import HeteroTrainJobStatus, as_body
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.saved import SavedCheckpoint
from heterotrain_operator.cluster_state.telemetry import (
    MemberGauges,
    MemberId,
    PreflightProblem,
    Rates,
    StepsInForce,
    Telemetry,
)  # fmt: skip
from heterotrain_operator.decide.job import decide
from jsonschema import Draft7Validator
from support.fake_cluster import NOW_S, FakeCluster, a_running_job, pool
from support.repeat import first_seed, times

SCHEMA = Draft7Validator(
    crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"],
    format_checker=Draft7Validator.FORMAT_CHECKER,
)
INT64 = 2**63


def checked(status: HeteroTrainJobStatus | None) -> dict[str, Any]:
    """Return the status as JSON, after checks by the models, by the schema of the CRD, and of every number."""
    assert status is not None
    body = as_body(status)
    HeteroTrainJobStatus.model_validate(body)
    SCHEMA.validate(body)
    text = json.dumps(body, allow_nan=False)

    def whole(digits: str) -> int:
        assert abs(int(digits)) < INT64
        return int(digits)

    found: dict[str, Any] = json.loads(text, parse_int=whole)
    assert len(text) < 100_000
    return found


def reported(cluster: FakeCluster, **gauges: Any) -> FakeCluster:
    """Let every worker report these values."""
    cluster.telemetry = replace(
        cluster.telemetry,
        gauges={MemberId(pod.uid, 0): MemberGauges(worker=pod.name, **gauges) for pod in cluster.pod_views},
        sequence=cluster.telemetry.sequence + 1,
    )
    return cluster


def test_a_seventeenth_metric_replaces_one_that_is_no_longer_reported() -> None:
    cluster = reported(a_running_job(), step=1, user_metrics={f"p{i:02}": 1.0 for i in range(16)})
    cluster.settle()
    reported(cluster, step=2, user_metrics={"best_loss": 0.5})
    status = checked(cluster.settle().status)
    assert len(status["metrics"]) == 16
    assert status["metrics"]["best_loss"] == 0.5


@pytest.mark.parametrize("value", [10**301, 2**63, -5, 1.7e308])
def test_counts_beyond_all_bounds_are_clamped(value: Any) -> None:
    cluster = reported(a_running_job(), step=value, epoch=value, samples_committed=value, epoch_samples=value)
    status = checked(cluster.step().status)
    assert 0 <= status.get("step", 0) < 2**53


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.79e308])
def test_numbers_that_json_cannot_hold_do_not_reach_the_status(value: float) -> None:
    cluster = reported(a_running_job(), step=1, loss=value, noise_scale_samples=value, user_metrics={"m": value})
    cluster.telemetry = replace(
        cluster.telemetry, rates=Rates(samples_per_s=value, step_s=value, solo_samples_per_s={MemberId("u", 0): value})
    )
    checked(cluster.step().status)


def test_prices_of_any_length_fit() -> None:
    most = "9" * 32
    cluster = FakeCluster(pool("a", pricePerHour=most), pool("b", pricePerHour=most)).with_nodes("a", "b").start()
    assert float(checked(cluster.settle().status)["pricePerHour"]) == pytest.approx(2e32)


def test_a_checkpoint_from_a_clock_that_is_ahead_counts_from_when_it_is_seen() -> None:
    cluster = reported(a_running_job(), step=1, checkpoint_step=5, checkpoint_time_s=NOW_S + 1e15)
    cluster.settle()
    first = checked(cluster.settle().status)["lastCheckpoint"]
    assert first == {"step": 5, "time": rfc3339(NOW_S)}
    cluster.pass_time(60.0).settle()
    assert cluster.status["lastCheckpoint"] == first
    reported(cluster, step=9, checkpoint_step=8, checkpoint_time_s=NOW_S + 1e15).settle()
    assert cluster.status["lastCheckpoint"] == {"step": 8, "time": rfc3339(NOW_S + 60)}


@pytest.mark.parametrize("ending", Ending)
def test_the_last_checkpoint_is_the_newest_of_telemetry_and_of_ended_workers(ending: Ending) -> None:
    """The one that is written after SIGTERM is never scraped; an ended worker may also have an older one."""
    cluster = reported(a_running_job(), step=4, checkpoint_step=4, checkpoint_time_s=NOW_S + 10)
    cluster.pass_time(60.0).settle()
    assert cluster.status["lastCheckpoint"] == {"step": 4, "time": rfc3339(NOW_S + 10)}
    cluster.end("job-w1", ending, saved=(3, NOW_S + 5)).step()
    assert cluster.status["lastCheckpoint"]["step"] == 4
    cluster.end("job-w2", ending, saved=(6, NOW_S + 50))
    assert checked(cluster.step().status)["lastCheckpoint"] == {"step": 6, "time": rfc3339(NOW_S + 50)}
    assert cluster.events.count("CheckpointSaved") == 2


def test_the_last_checkpoint_of_a_suspended_job_is_that_of_pods_that_are_gone() -> None:
    """They may be deleted before a pass has seen that they ended."""
    cluster = reported(a_running_job(), step=4, checkpoint_step=4, checkpoint_time_s=NOW_S)
    cluster.settle()
    cluster.edit(lambda spec: spec.update(suspend=True)).pass_time(60.0).settle()
    cluster.vanish("job-w0").vanish("job-w1").vanish("job-w2")
    cluster.telemetry = Telemetry()
    inputs = replace(cluster.observe(), saved=SavedCheckpoint(NOW_S + 30, 7))
    assert checked(decide(inputs).status)["lastCheckpoint"] == {"step": 7, "time": rfc3339(NOW_S + 30)}


def test_a_checkpoint_in_an_outcome_from_a_clock_that_is_ahead_counts_from_when_it_is_seen() -> None:
    cluster = a_running_job()
    cluster.end("job-w2", Ending.FAILED, exit_code=1, saved=(5, LATEST_S)).settle()
    first = checked(cluster.settle().status)["lastCheckpoint"]
    assert first == {"step": 5, "time": rfc3339(NOW_S)}
    cluster.pass_time(60.0).settle()
    assert cluster.status["lastCheckpoint"] == first


@pytest.mark.parametrize(
    "message",
    [
        '{"ending":"finished","reason":"","epoch":1e999,"step":0}',
        '{"ending":"finished","reason":"","epoch":NaN,"step":0}',
        '{"ending":"finished","reason":"","epoch":0,"step":' + "9" * 400 + "}",
        '{"ending":"finished","reason":"","epoch":0,"step":' + "9" * 5000 + "}",
        '{"ending":"finished","reason":"","epoch":-1,"step":0}',
        "[" * 1500,
        '{"ending":' * 600,
    ],
)
def test_a_hostile_termination_message_is_not_an_outcome_and_the_pass_goes_on(message: str) -> None:
    assert decode_outcome(message) is None
    cluster = a_running_job()
    cluster.end("job-w2")
    cluster.pods["job-w2"]["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    decision = cluster.step()
    assert not decision.faults
    assert cluster.members() == ["job-w0", "job-w1"]
    assert checked(decision.status)["restarts"] == 1


def test_metrics_of_an_outcome_are_bounded() -> None:
    metrics = {f"m{i:02}": float(i) for i in range(20)} | {"long" * 100: 1.0, "inf": float("inf"), "nan": float("nan")}
    found = decode_outcome(json.dumps({"ending": "left", "reason": "", "epoch": 0, "step": 0, "metrics": metrics}))
    assert found is not None
    assert list(found.metrics) == [f"m{i:02}" for i in range(16)]


WILD: tuple[Any, ...] = (0, 1, -1, 3, 0.1, 5e-324, 2**31, 2**53, 2**63, 10**301, 1e308, -1e308, float("inf"))
WILD += (float("nan"), None)


def wild_telemetry(rng: random.Random, cluster: FakeCluster) -> Telemetry:
    def value() -> Any:
        return rng.choice(WILD)

    others = ("worker", "peak_memory_bytes", "user_metrics", "preflight_problems")
    numbers = [f.name for f in fields(MemberGauges) if f.name not in others]
    members = [MemberId(pod.uid, rng.choice((0, 0, 0, 5))) for pod in cluster.pod_views]
    version = cluster.version()
    return Telemetry(
        problem=rng.choice(("", "p" * 5000)),
        dropped=rng.choice(("", "d" * 5000)),
        newest_sample_s=NOW_S,
        gauges={
            member: MemberGauges(
                worker="w" * 300,
                user_metrics={f"m{rng.randrange(99)}": value() or 0.0 for _ in range(rng.randrange(40))},
                peak_memory_bytes={rng.choice((1, 2, 64)): value() or 0.0},
                preflight_problems=(PreflightProblem(rng.random() < 0.5, "c" * 300, "m" * 5000),) * rng.randrange(40),
                **{
                    name: value() if name not in ("pause_s", "pauses", "checkpoint_failures") else (value() or 0)
                    for name in numbers
                },
            )
            for member in members
        },
        rates=Rates(
            samples_per_s=value(), step_s=value(), solo_samples_per_s={member: value() or 0.0 for member in members}
        ),
        in_force={
            member: StepsInForce(version=version, steps={33: rng.choice((0, 50, 2**53))}, step_s={33: value() or 0.0})
            for member in members
        },
        sequence=1,
    )


def test_the_status_is_valid_and_membership_is_decided_for_any_telemetry() -> None:
    """Telemetry is bounded before it gets here. This holds even where a bound is forgotten."""
    rng = random.Random(first_seed(gate=4))  # noqa: S311  # reproducible
    cluster = a_running_job()
    cluster.job["spec"]["workerPools"][0]["pricePerHour"] = "9" * 32
    cluster.job["spec"]["checkpoint"] = {"uri": "file:///checkpoints"}
    cluster.learns = False
    kept = json.dumps([cluster.job, cluster.pods, cluster.plan])
    for number in range(times(gate=100, every=4000)):
        cluster.job, cluster.pods, cluster.plan = json.loads(kept)
        if number % 2:
            cluster.end("job-w2", exit_code=137)
        cluster.telemetry = wild_telemetry(rng, cluster)
        with suppress(ArithmeticError, ValueError, TypeError):  # the learner reports it
            cluster.learn()
        decision = decide(cluster.observe())
        checked(decision.status)
        if number % 2:
            assert decision.plan is not None
            ranks = json.loads(decision.plan["data"][keys.PLAN_KEY])["ranks"]
            assert [rank["worker"] for rank in ranks] == ["job-w0", "job-w1"]
