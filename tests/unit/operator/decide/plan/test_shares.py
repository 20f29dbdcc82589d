"""Shares follow the measurements, stay without better evidence, and never wait for telemetry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.decide.learn.throughput import ThroughputModel
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen
from support.fake_cluster import FakeCluster, pool

# Seconds per sample and fixed seconds of the workers of pools a, b and c: 4 : 2 : 1 or so.
SPEEDS = {"job-w0": (0.01, 0.02), "job-w1": (0.02, 0.02), "job-w2": (0.04, 0.02)}


def steps_of(name: str, member: str, shares: tuple[int, ...], *, ended_s: float) -> tuple[Observation, ...]:
    """Return observations of ten steps at each of these shares."""
    per_sample_s, fixed_s = SPEEDS[name]
    counters = {}
    for share in shares:
        own_s = fixed_s + per_sample_s * share
        phases = {
            metrics.PHASE_LOAD: 0.0,
            metrics.PHASE_FORWARD: own_s / 3,
            metrics.PHASE_BACKWARD: own_s * 2 / 3,
            metrics.PHASE_UPDATE: 0.0,
            metrics.PHASE_SYNC: 0.0,
            metrics.PHASE_COMPUTE: own_s,
            metrics.PHASE_STEP: own_s,
        }
        key = CounterKey(member=member, share_samples=share, micro_batch_samples=share)
        counters[key] = Counters(
            steps=10,
            phase_s={phase: 10 * seconds for phase, seconds in phases.items()},
            phase_s2={phase: 10 * seconds**2 for phase, seconds in phases.items()},
        )
    return tuple(replace(found, warm_up=False) for found in observe({}, counters, ended_s=ended_s))


def telemetry_of(cluster: FakeCluster, *, shares: tuple[int, ...] = (20, 30, 40)) -> Telemetry:
    """Return telemetry with observations of every member at these shares."""
    observations, gauges = {}, {}
    for rank in cluster.plan_json["ranks"]:
        identity = MemberId(rank["worker_uid"], rank["local_rank"])
        name = f"{rank['worker_uid']}/{rank['local_rank']}"
        observations[identity] = steps_of(rank["worker"], name, shares, ended_s=100.0)
        gauges[identity] = MemberGauges(worker=rank["worker"], generation=1, revision=1)
    return Telemetry(observations=observations, gauges=gauges, newest_sample_s=cluster.now_s, sequence=1)


def a_running_job(**training: object) -> FakeCluster:
    return FakeCluster(spec={"training": training}).with_nodes("a", "b", "c").start()


def shares_of(cluster: FakeCluster) -> list[int]:
    return [member["share_samples"] for member in cluster.plan_json["members"]]


def test_shares_follow_measured_speed_in_a_new_revision_of_the_same_generation() -> None:
    cluster = a_running_job()
    generation, revision = cluster.version()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    assert cluster.version()[0] == generation
    assert cluster.version()[1] > revision
    fast, middle, slow = shares_of(cluster)
    assert fast + middle + slow == 100
    assert fast > 1.5 * middle
    assert middle > 1.5 * slow
    assert cluster.plan_json["members"][0]["compute"] is not None
    assert cluster.plan_json["prediction"]["step_s"] > 0
    assert "SharesPlanned" in cluster.events
    assert "batchReason" not in cluster.status, "the batch is fixed"


def test_the_same_evidence_changes_nothing_twice() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    version = cluster.version()
    cluster.telemetry = replace(cluster.telemetry, sequence=2)
    cluster.settle()
    assert cluster.version() == version


def test_boundary_never_keeps_even_shares_whatever_is_measured() -> None:
    cluster = a_running_job(rebalance={"boundary": "Never"})
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    assert shares_of(cluster) == [34, 33, 33]
    assert cluster.plan_json["boundary"]["kind"] == "Never"
    assert cluster.plan_json["probe"] == []


def test_lost_telemetry_leaves_the_last_good_plan() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    version, shares = cluster.version(), shares_of(cluster)
    cluster.telemetry = replace(cluster.telemetry, problem="Prometheus can't be reached", reason="Unavailable")
    cluster.settle()
    assert (cluster.version(), shares_of(cluster)) == (version, shares)
    assert cluster.condition("TelemetryAvailable") == ("False", "Unavailable")
    assert cluster.status["state"] == "Running"
    assert "samplesPerSecond" not in cluster.status
    assert cluster.events.count("TelemetryUnavailable") == 1


def test_a_new_operator_without_telemetry_keeps_the_shares_of_the_plan() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    shares = shares_of(cluster)
    cluster.telemetry = Telemetry()
    cluster.settle()
    assert shares_of(cluster) == shares


def test_survivors_get_shares_by_their_known_speeds() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    cluster.vanish("job-w1")
    cluster.step()
    assert cluster.members() == ["job-w0", "job-w2"]
    fast, slow = shares_of(cluster)
    assert fast + slow == 100
    assert fast > 3 * slow


def timed(telemetry: Telemetry, generation: int, exchange_s: float, *, steps: int = 30) -> Telemetry:
    """Return the telemetry with exchanges that took so long under this generation."""
    return replace(
        telemetry,
        observations={
            member: tuple(
                replace(o, generation=generation, bucket_steps=steps, overlapped_s=exchange_s, last_bucket_s=0.0)
                for o in found
            )
            for member, found in telemetry.observations.items()
        },
    )


@pytest.mark.parametrize(
    ("seen", "expected_s"),
    [
        ((), 0.03 * (1 / 2) / (2 / 3)),
        (tuple(ExchangeSeen(members=n, across=True, seconds=0.015 * (n - 1), steps=90) for n in (5, 3)), 0.015),
    ],
)
def test_the_exchange_of_new_members_is_expected_until_it_is_measured(
    seen: tuple[ExchangeSeen, ...], expected_s: float
) -> None:
    """Among three members it took 30 ms; two of them are left, and no step of theirs is measured yet."""
    cluster = a_running_job()
    before = cluster.version()[0]
    cluster.model = replace(cluster.model, throughput=ThroughputModel(exchange_seen=seen))
    cluster.telemetry = timed(telemetry_of(cluster), before, 0.03)
    cluster.settle()
    assert cluster.plan_json["communication"]["overlapped_s"] == pytest.approx(0.03)
    cluster.vanish("job-w1")
    cluster.step()
    assert cluster.plan_json["communication"]["overlapped_s"] == pytest.approx(expected_s, rel=0.05)
    cluster.telemetry = replace(cluster.telemetry, sequence=2)
    cluster.settle()
    found = cluster.plan_json["communication"]["overlapped_s"]
    assert found == pytest.approx(expected_s, rel=0.05), "old measurements do not come back"


@pytest.mark.parametrize("speed_known", [True, False])
def test_a_worker_that_returns_gets_the_share_of_its_pool_at_once(speed_known: bool) -> None:
    """No worker of its pool trains any more, but the speed of the previous one may still be known."""
    cluster = a_running_job()
    telemetry = telemetry_of(cluster)
    pools = {
        MemberId(rank["worker_uid"], 0): member["pool"]
        for rank, member in zip(cluster.plan_json["ranks"], cluster.plan_json["members"], strict=True)
    }
    cluster.telemetry = replace(telemetry, pools=pools if speed_known else {})
    cluster.settle()
    before = shares_of(cluster)
    cluster.vanish("job-w2")
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()
    assert cluster.members() == ["job-w0", "job-w1", "job-w2"]
    assert cluster.plan_json["ranks"][2]["worker_uid"] not in {identity.worker_uid for identity in pools}
    likeness = [abs(now - then) for now, then in zip(shares_of(cluster), before, strict=True)]
    assert (max(likeness) <= 1) == speed_known


def test_a_changed_boundary_reaches_the_plan_without_a_new_generation() -> None:
    cluster = a_running_job()
    generation, revision = cluster.version()
    cluster.edit(lambda spec: spec["training"].update(rebalance={"boundary": "Steps", "everySteps": 50}))
    cluster.settle()
    assert cluster.version() == (generation, revision + 1)
    assert cluster.plan_json["boundary"] == {"kind": "Steps", "every_steps": 50}


def test_the_next_plan_contains_the_micro_batch_cap_of_a_worker() -> None:
    cluster = a_running_job()
    telemetry = telemetry_of(cluster)
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    capped = {**telemetry.gauges, first: replace(telemetry.gauges[first], micro_batch_cap_samples=8)}
    cluster.telemetry = replace(telemetry, gauges=capped)
    cluster.settle()
    assert cluster.plan_json["members"][0]["micro_batch_samples"] == 8


def test_the_first_plan_contains_each_pool_s_micro_batch_size_and_a_smaller_learned_one_replaces_it() -> None:
    """A worker need not run out of memory to find it, and one that does keeps to half."""
    sizes = {"a": 20, "c": 12}
    pools = [pool(name, **({"microBatchSize": sizes[name]} if name in sizes else {})) for name in ("a", "b", "c")]
    cluster = FakeCluster(*pools).with_nodes("a", "b", "c").start()
    assert [member["micro_batch_samples"] for member in cluster.plan_json["members"]] == [20, 0, 12]
    telemetry = telemetry_of(cluster)
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    for learned, expected in ((10, 10), (64, 20)):
        gauges = {**telemetry.gauges, first: replace(telemetry.gauges[first], micro_batch_cap_samples=learned)}
        cluster.telemetry = replace(telemetry, gauges=gauges)
        cluster.settle()
        assert [member["micro_batch_samples"] for member in cluster.plan_json["members"]] == [expected, 0, 12]
    cluster.edit(lambda spec: spec["workerPools"][2].update(microBatchSize=6))
    cluster.settle()
    assert cluster.plan_json["members"][2]["micro_batch_samples"] == 6, "a running job takes a new size"


def test_peak_memory_limits_micro_batches_before_memory_runs_out() -> None:
    """The fit is 1 GB plus 0.1 GB per sample, and 92 % of a 5 GB device may be used: 36 samples."""
    cluster = a_running_job()
    telemetry = telemetry_of(cluster)
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)

    def peaks_at(*sizes: int) -> Telemetry:
        peaks = {size: 1e9 + 1e8 * size for size in sizes}
        gauges = replace(telemetry.gauges[first], device_memory_bytes=5e9, peak_memory_bytes=peaks)
        return replace(telemetry, gauges={**telemetry.gauges, first: gauges})

    cluster.telemetry = peaks_at(10, 20)
    cluster.settle()
    member = cluster.plan_json["members"][0]
    assert member["micro_batch_samples"] == 36
    assert member["share_samples"] > 36, "a larger share is accumulated over micro-batches"
    version = cluster.version()
    cluster.telemetry = peaks_at(10, 20, 33)
    cluster.settle()
    assert cluster.version() == version, "the same limit from other steps changes nothing"


def test_each_worker_is_reported_with_its_binding_constraint() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    named = zip(cluster.plan_json["ranks"], cluster.plan_json["prediction"]["bindings"], strict=True)
    bindings = {rank["worker"]: binding for rank, binding in named}
    assert {row["name"]: row["binding"] for row in cluster.status["workers"]} == bindings
    assert set(bindings.values()) == {"Compute"}


def test_applied_versions_are_those_that_every_member_reports() -> None:
    cluster = a_running_job()
    cluster.settle()
    generation, revision = cluster.version()
    telemetry = telemetry_of(cluster)
    gauges = {m: replace(g, generation=generation, revision=revision) for m, g in telemetry.gauges.items()}
    cluster.telemetry = Telemetry(gauges=gauges, sequence=1)
    cluster.settle()
    assert cluster.status["plan"]["applied"] == f"{generation}.{revision}"
    assert cluster.condition("PlanApplied") == ("True", "Applied")
    assert cluster.events.count("PlanApplied") == 1
    first = next(iter(gauges))
    cluster.telemetry = Telemetry(gauges={**gauges, first: replace(gauges[first], revision=revision - 1)}, sequence=2)
    cluster.settle()
    assert cluster.condition("PlanApplied") == ("False", "WaitingForBoundary")


def test_progress_comes_from_the_furthest_member() -> None:
    cluster = a_running_job(epochs=2)
    first, second, _ = (MemberId(rank["worker_uid"], 0) for rank in cluster.plan_json["ranks"])
    cluster.telemetry = Telemetry(
        gauges={
            first: MemberGauges(
                worker="job-w0", step=10, samples_committed=1000, epoch_samples=1000, epoch=1, loss=0.51234
            ),
            second: MemberGauges(
                worker="job-w1",
                step=9,
                samples_committed=900,
                epoch_samples=1000,
                epoch=0,
                user_metrics={"accuracy": 0.9},
            ),
        },
        sequence=1,
    )
    cluster.settle()
    status = cluster.status
    assert (status["epoch"], status["step"], status["samples"]) == (1, 10, 1000)
    assert (status["loss"], status["metrics"]) == (0.5123, {"accuracy": 0.9})
    assert (status["progress"], status["progressPercentage"]) == ("50%", 50)


def test_metrics_stay_within_their_limit_when_a_script_reports_under_new_names() -> None:
    cluster = a_running_job()
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    for step, prefix in enumerate(("old", "new"), start=1):
        reported = {f"{prefix}{number:02}": float(number) for number in range(12)}
        gauges = MemberGauges(worker="job-w0", step=step, samples_committed=100 * step, user_metrics=reported)
        cluster.telemetry = Telemetry(gauges={first: gauges}, sequence=step)
        cluster.settle()
    metrics = cluster.status["metrics"]
    assert len(metrics) == 16
    assert reported.items() <= metrics.items()


def test_the_status_has_the_selector_of_the_job_s_workers() -> None:
    cluster = a_running_job()
    wanted = dict(pair.split("=") for pair in cluster.status["selector"].split(","))
    assert cluster.pods
    assert all(wanted.items() <= pod["metadata"]["labels"].items() for pod in cluster.pods.values())


def test_progress_never_falls_when_the_furthest_member_is_gone() -> None:
    cluster = a_running_job(epochs=2)
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    gauges = MemberGauges(worker="job-w0", step=10, samples_committed=1000, epoch_samples=1000, epoch=1)
    cluster.telemetry = Telemetry(gauges={first: gauges}, sequence=1)
    cluster.settle()
    cluster.telemetry = Telemetry(gauges={first: replace(gauges, step=3, samples_committed=300)}, sequence=2)
    cluster.settle()
    assert (cluster.status["step"], cluster.status["progress"]) == (10, "50%")


@pytest.mark.parametrize("age_minutes", [1, 30])
def test_a_late_checkpoint_is_reported(age_minutes: float) -> None:
    spec = {"checkpoint": {"uri": "file:///x", "intervalSeconds": 600}}
    cluster = FakeCluster(spec=spec).with_nodes("a", "b", "c").start()
    first = MemberId(cluster.plan_json["ranks"][0]["worker_uid"], 0)
    saved_s = cluster.now_s
    cluster.pass_time(age_minutes * 60)
    gauges = MemberGauges(worker="job-w0", step=5, checkpoint_step=4, checkpoint_time_s=saved_s)
    cluster.telemetry = Telemetry(gauges={first: gauges}, sequence=1)
    cluster.settle()
    late = age_minutes > 21
    assert cluster.condition("CheckpointHealthy") == (("False", "CheckpointOverdue") if late else ("True", "Saved"))
    assert cluster.status["lastCheckpoint"]["step"] == 4
    assert "CheckpointSaved" in cluster.events


def test_shares_stay_while_a_member_is_about_to_leave() -> None:
    """New shares could take effect only after the membership has changed."""
    cluster = a_running_job()
    cluster.taint("c", "karpenter.sh/disrupted:NoSchedule")
    cluster.settle()
    version = cluster.version()
    cluster.telemetry = telemetry_of(cluster)
    cluster.settle()
    assert cluster.version() == version


def test_shares_that_are_refined_before_their_boundary_are_published_once() -> None:
    cluster = a_running_job()
    cluster.telemetry = telemetry_of(cluster, shares=(20, 30))
    cluster.settle()
    gauges = {m: replace(g, generation=1, revision=1) for m, g in cluster.telemetry.gauges.items()}
    for sequence, fixed_s in enumerate((0.5, 1.0, 2.0)):
        SPEEDS["job-w0"] = (0.01, fixed_s)
        try:
            cluster.telemetry = replace(telemetry_of(cluster, shares=(20, 30)), gauges=gauges, sequence=10 + sequence)
        finally:
            SPEEDS["job-w0"] = (0.01, 0.02)
        cluster.settle()
    assert cluster.version()[1] > 3
    assert cluster.events.count("SharesPlanned") == 1
