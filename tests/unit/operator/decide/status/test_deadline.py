"""A job with a deadline: the allocation gives it just enough workers, and its conditions report when it will end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.plan import Binding, Plan, Prediction
from heterotrain_operator.cluster_state.parse import parse_job, rfc3339
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Rates, Sustained, Telemetry
from heterotrain_operator.decide.learn.throughput import throughput_of
from heterotrain_operator.decide.status.training_conditions import duration_text
from support.fake_cluster import NOW_S, FakeCluster, job_body, pool
from support.multi_job_cluster import MultiJobCluster

HOUR_S = 3600.0


def a_cluster(*, left_samples: int, deadline_s: float, prices: bool = True) -> tuple[MultiJobCluster, FakeCluster]:
    """Return a job that has trained for a while on four slow and four fast nodes: 100 and 300 samples/s per worker."""
    multi = MultiJobCluster().with_nodes("a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4", cpu="1")
    priced = [{"pricePerHour": price} if prices else {} for price in ("1.0", "4.0")]
    job = multi.add(
        "one",
        pool("a", maxReplicas=4, **priced[0]),
        pool("b", maxReplicas=4, **priced[1]),
        training={"epochs": 10},
        objective="Deadline",
        deadline=rfc3339(NOW_S + deadline_s),
    )
    multi.speeds = {"one": {"a": 100.0, "b": 300.0}}
    multi.settle()
    assert multi.placed() == {"one": {"a": 4, "b": 4}}, "until its remaining work is known, it takes what fits"
    assert job.condition("DeadlineAtRisk") == ("Unknown", "NotMeasured")
    progress(job, left_samples=left_samples)
    return multi, job


def progress(job: FakeCluster, *, left_samples: int) -> None:
    """Set the rest of the ten epochs in the telemetry."""
    total = 10 * max(1_000_000, left_samples)
    epoch, cursor = divmod(total - left_samples, total // 10)
    gauges = MemberGauges(
        worker="one-w0", step=100, samples_committed=total - left_samples, epoch_samples=total // 10, epoch=epoch,
        cursor_samples=cursor,
    )  # fmt: skip
    job.telemetry = Telemetry(gauges={MemberId("uid", 0): gauges}, newest_sample_s=job.now_s)


def test_with_enough_time_it_keeps_the_cheapest_sufficient_workers() -> None:
    multi, job = a_cluster(left_samples=int(250 * HOUR_S), deadline_s=HOUR_S)
    multi.settle()
    assert multi.placed() == {"one": {"a": 3}}, "300 samples/s at a third of the price of one that is as fast"
    assert job.condition("WorkersLimited") == ("True", "EnoughForDeadline")
    assert job.condition("DeadlineAtRisk") == ("False", "OnTrack")
    assert "ends 9.6 min before" in job.message("DeadlineAtRisk")
    assert "in time for its deadline" in job.message("WorkersLimited")
    assert multi.waiting("one") == 0, "a sufficient grant leaves no worker waiting"
    assert (job.status["disruptions"], job.status["restarts"]) == (0, 0)


def test_without_prices_the_fewest_workers_are_the_cheapest() -> None:
    multi, _ = a_cluster(left_samples=int(250 * HOUR_S), deadline_s=HOUR_S, prices=False)
    multi.settle()
    assert multi.placed() == {"one": {"b": 1}}


def test_an_earlier_deadline_brings_workers_and_an_impossible_one_is_reported() -> None:
    multi, job = a_cluster(left_samples=int(250 * HOUR_S), deadline_s=HOUR_S)
    multi.settle()
    job.job["spec"]["deadline"] = rfc3339(multi.now_s + HOUR_S / 4)
    job.job["metadata"]["generation"] = 2
    multi.settle()
    assert multi.placed()["one"]["b"] >= 2
    assert job.condition("DeadlineAtRisk") == ("False", "OnTrack")
    job.job["spec"]["deadline"] = rfc3339(multi.now_s + HOUR_S / 8)
    multi.settle()
    assert multi.placed() == {"one": {"a": 4, "b": 4}}, "as fast as possible"
    assert job.condition("DeadlineAtRisk") == ("True", "Late")
    assert "ends 2 min after" in job.message("DeadlineAtRisk")
    assert "DeadlineAtRisk" in job.events
    job.job["spec"]["deadline"] = rfc3339(multi.now_s + HOUR_S)
    multi.settle()
    assert job.condition("DeadlineAtRisk") == ("False", "OnTrack")
    assert "DeadlineOnTrack" in job.events
    job.now_s = multi.now_s = multi.now_s + 2 * HOUR_S
    multi.step()
    assert job.condition("DeadlineAtRisk") == ("True", "Passed")


def test_a_job_that_is_slower_than_predicted_gets_more_workers() -> None:
    multi, job = a_cluster(left_samples=int(250 * HOUR_S), deadline_s=HOUR_S)
    multi.settle()
    assert multi.placed() == {"one": {"a": 3}}
    plan = decode_plan(json.dumps(job.plan_json), job_uid="uid-of-one")
    assert isinstance(plan, Plan)
    ranks = len(plan.members)
    plan = replace(
        plan,
        prediction=Prediction(step_s=0.5, efficiency=1.0, efficiency_ceiling=1.0, bindings=(Binding.COMPUTE,) * ranks),
    )
    rates = Rates(sustained=Sustained(plan.generation, 0.7 * plan.global_batch_samples / 0.5, 60.0))
    known = throughput_of(job.model.throughput, plan, Telemetry(rates=rates))
    assert known.pace == pytest.approx(0.7)
    other = Rates(sustained=Sustained(plan.generation - 1, 1.0, 60.0))
    assert throughput_of(known, plan, Telemetry(rates=other)).pace == known.pace, (
        "rates of an earlier generation do not count"
    )
    job.model = replace(job.model, throughput=known)
    multi.settle()
    assert sum(n * {"a": 100, "b": 300}[name] for name, n in multi.placed()["one"].items()) * 0.7 > 250


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "Deadline"}, "give both or neither"),
        ({"deadline": rfc3339(NOW_S + 60)}, "give both or neither"),
        ({"objective": "Deadline", "deadline": rfc3339(NOW_S - 60)}, "had passed when the job was created"),
        ({"objective": "Deadline", "deadline": "tomorrow"}, "spec.deadline"),
    ],
)
def test_contradictory_deadlines_are_refused_in_a_sentence(changes: dict[str, str], words: str) -> None:
    assert words in parse_job(job_body(spec=changes)).problem


def test_durations_have_two_digits() -> None:
    assert [duration_text(s) for s in (12.3, 100.0, 4000.0, 200_000.0)] == ["12 s", "1.7 min", "1.1 h", "2.3 days"]
