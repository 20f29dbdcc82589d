"""Jobs whose workers hold the model together: one member for each pod."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.config import decode_config
from heterotrain_core.contract.plan import LayoutKind, Plan
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.decide.plan.arrangement import names_of
from heterotrain_planner.perf.counters import CounterKey, Counters, observe
from support.fake_cluster import FakeCluster, pool

SECONDS_PER_SAMPLE = {"job-w0": 0.01, "job-w1": 0.02}


def a_job(**spec: object) -> FakeCluster:
    """Return a running job of two workers with four and two processes, which are members of their own."""
    pools = (pool("a", numProcPerWorker=4), pool("b", numProcPerWorker=2))
    cluster = FakeCluster(*pools, spec={"parallelism": {"mode": "Sharded"}, **spec})
    return cluster.with_nodes("a", "b").start()


def plan_of(cluster: FakeCluster) -> Plan:
    """Return the newest plan."""
    plan = decode_plan(json.dumps(cluster.plan_json), job_uid=cluster.plan_json["job_uid"])
    assert isinstance(plan, Plan)
    return plan


def measured(cluster: FakeCluster, *, slow: MemberId | None = None, **gauges: object) -> Telemetry:
    """Return telemetry of every rank at three shares; one rank may take three times as long as the others."""
    plan = plan_of(cluster)
    observations = {}
    for rank in plan.ranks:
        identity, name = MemberId(rank.worker_uid, rank.local_rank), f"{rank.worker_uid}/{rank.local_rank}"
        per_sample_s = SECONDS_PER_SAMPLE[rank.worker] * (3 if identity == slow else 1)
        counters = {}
        for share in (20, 40, 60):
            phases = {"load": 0.0, "forward": 0.3, "backward": 0.6, "sync": 0.0, "update": 0.0, "compute": 0.9}
            seconds = {phase: 50 * (0.02 + per_sample_s * share * part / 0.9) for phase, part in phases.items()}
            squares = {phase: total**2 / 50 * 1.0001 for phase, total in seconds.items()}
            key = CounterKey(member=name, share_samples=share, micro_batch_samples=share)
            counters[key] = Counters(steps=50, phase_s=seconds, phase_s2=squares)
        observations[identity] = observe({}, counters, ended_s=100.0)
    common = {identity: MemberGauges(worker="w", generation=1, revision=1, **gauges) for identity in observations}  # type: ignore[arg-type]  # tests pass what they mean
    return Telemetry(observations=observations, gauges=common, newest_sample_s=cluster.now_s, sequence=1)


def test_the_processes_of_a_worker_are_the_shards_of_one_member() -> None:
    plan = plan_of(a_job())
    assert [(m.index, m.pool, m.layout.kind, m.layout.shards) for m in plan.members] == [
        (0, "a", LayoutKind.SHARDED, 4),
        (1, "b", LayoutKind.SHARDED, 2),
    ]
    assert [(r.rank, r.member, r.worker, r.local_rank, r.shard, r.stage) for r in plan.ranks] == [
        (0, 0, "job-w0", 0, 0, 0),
        (1, 0, "job-w0", 1, 1, 0),
        (2, 0, "job-w0", 2, 2, 0),
        (3, 0, "job-w0", 3, 3, 0),
        (4, 1, "job-w1", 0, 0, 0),
        (5, 1, "job-w1", 1, 1, 0),
    ]
    assert plan.shares == (50, 50)
    assert names_of(plan) == ("job-w0", "job-w1")


def test_without_the_mode_each_process_is_a_member() -> None:
    plan = plan_of(a_job(parallelism={}))
    assert [member.layout.ranks for member in plan.members] == [1] * 6
    assert names_of(plan) == ("job-w0", "job-w0/1", "job-w0/2", "job-w0/3", "job-w1", "job-w1/1")


def test_the_trainer_gets_the_mode() -> None:
    for spec, mode in (({}, "Sharded"), ({"parallelism": {"mode": "Data"}}, "Data")):
        (body, *_) = a_job(**spec).pods.values()
        (text,) = [e["value"] for e in body["spec"]["containers"][0]["env"] if e["name"] == "HETEROTRAIN_CONFIG"]
        assert decode_config(text).parallelism == mode


def test_shares_are_those_of_members_and_follow_their_slowest_rank() -> None:
    """The first worker is twice as fast. A slow shard makes its member slow, whichever shard it is."""
    cluster = a_job()
    cluster.telemetry = measured(cluster)
    cluster.settle()
    fast, slow = plan_of(cluster).shares
    assert 1.7 < fast / slow < 2.3
    uid = plan_of(cluster).ranks[2].worker_uid
    cluster.telemetry = replace(measured(cluster, slow=MemberId(uid, 2)), sequence=2)
    cluster.settle()
    fast, slow = plan_of(cluster).shares
    assert fast < slow


def test_a_micro_batch_is_that_of_the_whole_member() -> None:
    """The spec and the size that ran out of memory are of one process; peaks are reported by the member's size."""
    cluster = a_job(workerPools=[pool("a", numProcPerWorker=4, microBatchSize=3), pool("b", numProcPerWorker=2)])
    assert [member.micro_batch_samples for member in plan_of(cluster).members] == [12, 0]
    cluster.telemetry = measured(cluster, micro_batch_cap_samples=2)
    cluster.settle()
    assert [member.micro_batch_samples for member in plan_of(cluster).members] == [8, 4]


def test_the_status_counts_a_member_once() -> None:
    """Rows are by worker, the efficiency by member: four ranks that all report their member's rate are one."""
    cluster = a_job()
    telemetry = measured(cluster)
    rates = {identity: 100.0 if identity.local_rank else 80.0 for identity in telemetry.observations}
    cluster.telemetry = replace(
        telemetry, rates=replace(telemetry.rates, solo_samples_per_s=rates, samples_per_s=120.0)
    )
    cluster.settle()
    assert [row["samplesPerSecond"] for row in cluster.status["workers"]] == [80.0, 80.0]
    assert cluster.status["efficiency"] == pytest.approx(120 / 160)
    assert cluster.status["workers"][0]["shareSamples"] == plan_of(cluster).shares[0]
