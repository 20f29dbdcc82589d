"""Jobs whose members are planned from what the workers measured: several workers may form one member."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.consistency import problems
from heterotrain_core.contract.plan import LayoutKind, Plan
from heterotrain_core.split.balance import Infeasible
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Telemetry
from heterotrain_operator.decide.plan.stages import PROFILE_WAIT_S
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.perf.counters import CounterKey, Counters, observe
from support.fake_cluster import FakeCluster, pool
from support.repeat import times

GIB = 2**30
UNITS = 6
STATE = GIB
"""Bytes of training state of one unit: four times its parameters."""


def profile(name: str, *, units_that_fit: float, slowness: float = 1.0, units: int = UNITS) -> PoolProfile:
    """Return a profile of equal units of 10 ms a sample, on a device that holds some of them."""
    points = tuple(
        UnitSeconds(micro_batch_samples=n, forward_s=0.003 * n * slowness, backward_s=0.007 * n * slowness)
        for n in (1, 2, 4)
    )
    unit = UnitProfile(
        name="", parameter_bytes=STATE // 4, activation_bytes=2**20, boundary_bytes=2**16, seconds={name: points}
    )
    named = tuple(replace(unit, name=f"blocks.{index}") for index in range(units))
    return PoolProfile(memory_bytes=int(units_that_fit * STATE), units=named)


BIG_AND_SMALL = {"a": profile("a", units_that_fit=5), "b": profile("b", units_that_fit=2.5, slowness=2)}


def a_cluster(
    *pools: dict[str, object], profiles: Mapping[str, PoolProfile] = BIG_AND_SMALL, **spec: object
) -> FakeCluster:
    """Return a job in mode Pipeline with a node for each worker; its pools are a large and a small one."""
    chosen = pools or (pool("a", maxReplicas=1), pool("b", maxReplicas=1))
    given = {"parallelism": {"mode": "Pipeline"}, "elasticPolicy": {"minReplicas": 1}, **spec}
    cluster = FakeCluster(*chosen, spec=given)
    for each in chosen:
        cluster.with_nodes(str(each["name"]), cpu=str(each["maxReplicas"]))
    cluster.telemetry = Telemetry(profiles=profiles)
    return cluster


def plan_of(cluster: FakeCluster) -> Plan:
    """Return the newest plan; it keeps all rules of plans."""
    plan = decode_plan(json.dumps(cluster.plan_json), job_uid=cluster.plan_json["job_uid"])
    assert isinstance(plan, Plan)
    assert problems(plan) == ()
    return plan


def test_two_workers_that_hold_the_model_together_are_one_member() -> None:
    """Neither holds six units. The fast worker takes more of them, and their places follow the stages."""
    cluster = a_cluster().start()
    plan = plan_of(cluster)
    (member,) = plan.members
    assert member.layout.kind is LayoutKind.PIPELINE
    assert member.pool in ("a+b", "b+a")
    assert plan.shares == (100,)
    assert member.micro_batch_samples in (1, 2, 4, 8)
    pools = [plan.pool_of(rank) for rank in plan.ranks]
    edges = (0, *member.layout.cuts, UNITS)
    units = {name: edges[rank.stage + 1] - edges[rank.stage] for name, rank in zip(pools, plan.ranks, strict=True)}
    assert units == {"a": 4, "b": 2}
    assert [rank.stage for rank in plan.ranks] == [0, 1]
    assert plan.prediction is not None
    shown = cluster.status["plan"]["layout"]
    assert shown.startswith("1 member: [")
    assert "(blocks.0 to blocks." in shown
    held = {each["pool"]: each["units"] for each in cluster.status["workers"]}
    assert held in ({"a": "0-3", "b": "4-5"}, {"b": "0-1", "a": "2-5"})
    cluster.telemetry = Telemetry(
        profiles={
            key: replace(each, units=tuple(replace(unit, name="") for unit in each.units))
            for key, each in BIG_AND_SMALL.items()
        }
    )
    cluster.settle()
    assert cluster.status["plan"]["layout"] in (
        "1 member: [a: units 0-3 | b: 4-5]",
        "1 member: [b: units 0-1 | a: 2-5]",
    )
    assert cluster.condition("LayoutPlanned")[0] == "True"
    assert cluster.condition("Running")[0] == "True"
    assert cluster.condition("Degraded")[0] == "False"


def test_the_first_plan_waits_for_a_profile_of_each_pool() -> None:
    """Generation 0 stays while a pool measures, and a condition says so."""
    cluster = a_cluster(profiles={"a": BIG_AND_SMALL["a"]}).start()
    assert plan_of(cluster).generation == 0
    assert cluster.condition("LayoutPlanned")[0] == "False"
    assert "the workers of pool b measure the model's units" in cluster.message("LayoutPlanned")
    assert cluster.condition("Stalled")[0] == "False"
    assert cluster.settle().again_s is not None
    cluster.telemetry = Telemetry(profiles=BIG_AND_SMALL)
    cluster.settle()
    assert plan_of(cluster).generation == 1


def test_a_pool_whose_profile_never_comes_is_named_and_left_out() -> None:
    cluster = a_cluster(profiles={}).start()
    cluster.pass_time(PROFILE_WAIT_S + 1).settle()
    assert plan_of(cluster).generation == 0
    assert "pool a, b have exported no profile" in cluster.message("LayoutPlanned")
    assert "has to pass job.wrap a function" in cluster.message("Stalled")
    assert cluster.condition("Stalled")[0] == "True"
    cluster.telemetry = Telemetry(profiles={"a": profile("a", units_that_fit=7)})
    cluster.settle()
    assert cluster.members() == ["job-w0"]
    assert plan_of(cluster).members[0].layout.kind is LayoutKind.REPLICATED


def test_a_profile_that_cannot_be_used_says_why() -> None:
    cluster = a_cluster().start()
    cluster = a_cluster(profiles={}).start()
    cluster.telemetry = Telemetry(profile_problems={"b": "the bytes of unit 3 are missing or implausible"})
    cluster.pass_time(PROFILE_WAIT_S + 1).settle()
    assert "b: the bytes of unit 3 are missing" in cluster.message("LayoutPlanned")


def test_workers_with_different_models_are_refused() -> None:
    other = {"a": BIG_AND_SMALL["a"], "b": profile("b", units_that_fit=2, units=7)}
    cluster = a_cluster(profiles=other).start()
    assert plan_of(cluster).generation == 0
    assert "a model of 6 units, and those of pool b one of 7" in cluster.message("LayoutPlanned")


def test_a_model_that_fits_nowhere_is_told_in_bytes_and_with_a_remedy() -> None:
    """Nothing starts before one whole member fits."""
    small = {"a": profile("a", units_that_fit=2.5), "b": profile("b", units_that_fit=1.5)}
    cluster = a_cluster(profiles=small).start()
    assert plan_of(cluster).generation == 0
    told = cluster.message("LayoutPlanned")
    assert "the pipeline that holds most has 3 of 6 units" in told
    assert "A unit's training state takes 1 GiB" in told
    assert "Add 2 devices of kind a" in told
    assert (cluster.condition("Stalled")[0], cluster.condition("Running")[0]) == ("True", "False")
    assert cluster.status["reason"] == cluster.message("Running")


@pytest.mark.parametrize(("ratio", "told"), [(None, "1 GiB"), (4.0, "1 GiB"), (5.0, "1.25 GiB"), (2.0, "")])
def test_what_the_optimizer_holds_decides_what_fits(ratio: float | None, told: str) -> None:
    """With plain SGD, whose state is half of Adam's, a worker holds all six units; without a ratio, Adam is assumed."""
    profiles = {"a": replace(profile("a", units_that_fit=3.2), state_ratio=ratio)}
    cluster = a_cluster(pool("a", maxReplicas=1), profiles=profiles).start()
    assert cluster.condition("LayoutPlanned")[0] == str(not told)
    assert not told or f"A unit's training state takes {told}" in cluster.message("LayoutPlanned")


def test_a_step_ends_with_the_update_of_the_stage_that_takes_longest() -> None:
    """Where an image is too old to measure it, no pool has it: that pool would seem faster than the others."""

    def step_s(**seconds: float) -> float:
        profiles = {name: replace(found, update_s_per_byte=seconds.get(name)) for name, found in BIG_AND_SMALL.items()}
        plan = plan_of(a_cluster(profiles=profiles).start())
        assert plan.prediction is not None
        assert plan.members[0].layout.cuts == (4,)
        return plan.prediction.step_s

    without = step_s()
    assert step_s(a=1e-9, b=1e-9) == pytest.approx(without + 1e-9 * 4 * STATE / 4)
    assert step_s(a=1e-9, b=3e-9) == pytest.approx(without + 3e-9 * 2 * STATE / 4)
    assert step_s(a=1e-9) == without


def test_a_lost_stage_is_followed_by_a_new_cut_of_the_survivors() -> None:
    """Four equal workers hold the model in four stages; the three that are left are cut anew."""
    cluster = a_cluster(pool("a", maxReplicas=4), profiles={"a": profile("a", units_that_fit=4)}).start()
    first = plan_of(cluster)
    assert len(first.ranks) == 4
    cluster.vanish("job-w1").step()
    second = plan_of(cluster)
    assert (second.generation, second.revision) == (first.generation + 1, first.revision + 1)
    assert sorted(cluster.members()) == ["job-w0", "job-w2", "job-w3"]
    assert second.members[0].layout.cuts == (2, 4)
    assert second.reason.startswith("without job-w1")


def test_an_announced_leave_is_followed_by_a_new_cut_at_once() -> None:
    """The pod still runs: the plan without it goes to it, too, and it is not counted as lost."""
    cluster = a_cluster(pool("a", maxReplicas=4), profiles={"a": profile("a", units_that_fit=4)}).start()
    first = plan_of(cluster)
    cluster.pods["job-w1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    decision = cluster.step()
    second = plan_of(cluster)
    assert second.generation == first.generation + 1
    assert sorted(cluster.members()) == ["job-w0", "job-w2", "job-w3"]
    assert second.drain == ()
    assert second.reason.startswith("job-w1 will leave: its pod is being deleted")
    assert "job-w1" in {touched.name for touched in decision.touch}
    again = cluster.step()
    assert plan_of(cluster).version == second.version
    assert again.plan is None


def test_a_leave_that_leaves_too_few_workers_is_announced_and_the_members_stay() -> None:
    """They train on for as long as the leaving worker can wait."""
    cluster = a_cluster().start()
    cluster.pods["job-w1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.step()
    plan = plan_of(cluster)
    assert (plan.generation, plan.drain) == (1, ("job-w1",))
    assert len(plan.ranks) == 2


def test_without_enough_survivors_the_job_waits_and_says_for_what() -> None:
    cluster = a_cluster().start()
    cluster.vanish("job-w1")
    cluster.nodes.pop("b")
    cluster.settle()
    assert plan_of(cluster).generation == 1, "no member can be formed"
    assert cluster.condition("Restarting")[0] == "True"
    assert "the pipeline that holds most has 4 of 6 units" in cluster.message("LayoutPlanned")


def test_a_worker_that_would_not_help_is_a_spare() -> None:
    """A third worker is far too slow: the plan names it, the job is not degraded, and nothing changes again."""
    profiles = {**BIG_AND_SMALL, "c": profile("c", units_that_fit=1.5, slowness=1000)}
    pools = (pool("a", maxReplicas=1), pool("b", maxReplicas=1), pool("c", maxReplicas=1))
    cluster = a_cluster(*pools, profiles=profiles).start()
    plan = plan_of(cluster)
    assert plan.spares == ("job-w2",)
    assert len(plan.ranks) == 2
    assert cluster.condition("Degraded")[0] == "False"
    cluster.pass_time(60).settle()
    assert plan_of(cluster).version == plan.version


def test_a_joiner_that_does_not_pay_becomes_a_spare_without_a_new_generation() -> None:
    profiles = {**BIG_AND_SMALL, "c": profile("c", units_that_fit=1.5, slowness=1000)}
    pools = (pool("a", maxReplicas=1), pool("b", maxReplicas=1), pool("c", maxReplicas=1))
    cluster = a_cluster(*pools, profiles=profiles)
    cluster.nodes.pop("c")
    cluster.start()
    before = plan_of(cluster)
    cluster.with_nodes("c").schedule().run().settle()
    after = plan_of(cluster)
    assert (after.generation, after.spares) == (before.generation, ("job-w2",))
    assert after.ranks == before.ranks
    assert "job-w2 waits as a spare" in cluster.message("LayoutPlanned")
    assert after.reason == "job-w2 becomes a spare"


def test_a_spare_steps_in_for_a_lost_worker() -> None:
    """Two workers of b, of which one is enough: with a they hold the model. The second replaces the first."""
    profiles = {"a": profile("a", units_that_fit=5.1), "b": profile("b", units_that_fit=1.2, slowness=5)}
    cluster = a_cluster(pool("a", maxReplicas=1), pool("b", maxReplicas=2), profiles=profiles).start()
    (spare,) = plan_of(cluster).spares
    (lost,) = {"job-w1", "job-w2"} - {spare}
    cluster.vanish(lost).step()
    assert set(cluster.members()) == {"job-w0", spare}
    assert plan_of(cluster).spares == ()


def test_a_joiner_that_pays_starts_a_new_generation() -> None:
    cluster = a_cluster(pool("a", maxReplicas=2), pool("b", maxReplicas=2))
    cluster.nodes["a"]["status"]["allocatable"]["cpu"] = "1"
    cluster.nodes["b"]["status"]["allocatable"]["cpu"] = "1"
    cluster.start()
    before = plan_of(cluster)
    assert len(before.members) == 1
    cluster.nodes["a"]["status"]["allocatable"]["cpu"] = "2"
    cluster.nodes["b"]["status"]["allocatable"]["cpu"] = "2"
    cluster.settle()
    cluster.schedule().run().settle()
    after = plan_of(cluster)
    assert after.generation > before.generation
    assert len(after.ranks) == 4
    assert before.prediction is not None
    assert after.prediction is not None
    assert after.prediction.step_s < before.prediction.step_s


def test_the_minimum_counts_members() -> None:
    """Two workers form one member: with minReplicas 2 nothing starts, and the reason says so."""
    cluster = a_cluster(elasticPolicy={"minReplicas": 2}).start()
    assert plan_of(cluster).generation == 0
    told = cluster.message("LayoutPlanned")
    assert "these devices form 1 member and least_members is 2; a further member lacks 1 a and 1 b" in told


def test_two_planned_members_survive_the_loss_of_a_stage() -> None:
    """The whole member goes on although minReplicas is 2; the lost stage comes back by a new plan of two members."""
    profiles = {
        "a": profile("a", units_that_fit=6.1),
        "b": profile("b", units_that_fit=4.1, slowness=2),
        "c": profile("c", units_that_fit=2.3, slowness=2),
    }
    pools = tuple(pool(name, maxReplicas=1) for name in profiles)
    cluster = a_cluster(*pools, profiles=profiles, elasticPolicy={"minReplicas": 2}).start()
    first = plan_of(cluster)
    assert sorted(member.layout.stages for member in first.members) == [1, 2]
    assert first.min_replicas == 1
    (lost,) = (rank.worker for rank in first.ranks if rank.stage == 1)
    cluster.vanish(lost).settle()
    assert plan_of(cluster).generation == first.generation, "one member is fewer than a plan has to have"
    assert cluster.condition("Running")[0] == "True"
    cluster.schedule().run().settle()
    again = plan_of(cluster)
    assert again.generation == first.generation + 1
    assert sorted(member.layout.stages for member in again.members) == [1, 2]


def test_a_disruption_budget_counts_members() -> None:
    """Of two members, one pod may be evicted; of the last one all pods, but not while a new plan is on its way."""
    alike = {"a": profile("a", units_that_fit=4)}
    pools = (pool("a", maxReplicas=4, capacityType="OnDemand"),)
    cluster = a_cluster(*pools, profiles=alike, elasticPolicy={"minReplicas": 2}).start()
    plan = plan_of(cluster)
    assert [member.layout.stages for member in plan.members] == [2, 2]

    def needed() -> int:
        return int(cluster.step().apply[0]["spec"]["minAvailable"])

    assert needed() == 3
    at_once = cluster.cover_of
    cluster.cover_of = lambda _: None
    lost = plan.ranks[0].worker
    cluster.vanish(lost)
    assert needed() == 3, "the last whole member stays while the others are planned"
    cluster.cover_of = at_once
    assert needed() == 0, "one member is fewer than a plan has to have: a drain is not blocked"
    one = a_cluster(*pools, profiles=alike, elasticPolicy={"minReplicas": 1, "maxReplicas": 2}).start()
    assert [member.layout.stages for member in plan_of(one).members] == [2]
    assert one.settle().apply[0]["spec"]["minAvailable"] == 0


def test_the_plan_waits_while_the_planner_computes() -> None:
    """The planner answers later; until then the plan in force stays."""
    cluster = a_cluster()
    asked: list[Problem] = []
    at_once = cluster.cover_of

    def later(problem: Problem) -> None:
        asked.append(problem)

    cluster.cover_of = later
    cluster.start()
    assert plan_of(cluster).generation == 0
    assert cluster.condition("LayoutPlanned")[0] == "Unknown"
    assert [kind.count for kind in asked[-1].kinds] == [1, 1]
    cluster.cover_of = at_once
    cluster.settle()
    assert plan_of(cluster).generation == 1


def test_auto_is_data_where_every_device_holds_the_whole_model() -> None:
    profiles = {"a": profile("a", units_that_fit=8), "b": profile("b", units_that_fit=7)}
    cluster = a_cluster(profiles=profiles, parallelism={"mode": "Auto"}).start()
    assert [member.layout.kind for member in plan_of(cluster).members] == [LayoutKind.REPLICATED] * 2
    assert plan_of(cluster).shares == (50, 50)
    cut = a_cluster(parallelism={"mode": "Auto"}).start()
    assert [member.layout.kind for member in plan_of(cut).members] == [LayoutKind.PIPELINE]


def test_devices_keep_what_they_hold() -> None:
    """When one of two members loses a stage, the other one's workers keep their places."""
    alike = {"a": profile("a", units_that_fit=4)}
    cluster = a_cluster(pool("a", maxReplicas=5), profiles=alike, elasticPolicy={"minReplicas": 2}).start()
    before = {
        rank.worker: (rank.stage, plan_of(cluster).members[rank.member].layout) for rank in plan_of(cluster).ranks
    }
    assert len(plan_of(cluster).members) == 2
    lost = plan_of(cluster).ranks[0].worker
    whole = {rank.worker for rank in plan_of(cluster).ranks if rank.member == 1}
    cluster.vanish(lost).step()
    after = {rank.worker: (rank.stage, plan_of(cluster).members[rank.member].layout) for rank in plan_of(cluster).ranks}
    assert len(plan_of(cluster).members) == 2
    assert {name for name, place in after.items() if before[name] == place} >= whole


def measured(cluster: FakeCluster, seconds: Mapping[int, float]) -> Telemetry:
    """Return telemetry in which each member's ranks took these seconds per sample at three shares."""
    plan = plan_of(cluster)
    observations = {}
    for rank in plan.ranks:
        identity, micro = MemberId(rank.worker_uid, rank.local_rank), plan.members[rank.member].micro_batch_samples
        counters = {}
        for share in (24, 48, 72):
            phases = {"load": 0.0, "forward": 0.3, "backward": 0.7, "sync": 0.0, "update": 0.0, "compute": 1.0}
            total = {phase: 50 * share * part * seconds[rank.member] for phase, part in phases.items()}
            squares = {phase: value**2 / 50 * 1.0001 for phase, value in total.items()}
            key = CounterKey(member=identity.worker_uid + "/0", share_samples=share, micro_batch_samples=micro)
            counters[key] = Counters(steps=50, phase_s=total, phase_s2=squares)
        observations[identity] = observe({}, counters, ended_s=100.0)
    gauges = {identity: MemberGauges(worker="w", generation=1, revision=1) for identity in observations}
    return Telemetry(
        observations=observations,
        gauges=gauges,
        profiles=cluster.telemetry.profiles,
        newest_sample_s=cluster.now_s,
        sequence=1,
    )


@pytest.mark.parametrize("mode", ["Pipeline", "Auto"])
def test_shares_are_the_planner_s_first_and_then_follow_the_measurements(mode: str) -> None:
    """Two pipelines of equal shape: both get half, until one turns out to be slower than the other."""
    alike, spec = {"a": profile("a", units_that_fit=4)}, {"parallelism": {"mode": mode}}
    cluster = a_cluster(pool("a", maxReplicas=4), profiles=alike, elasticPolicy={"minReplicas": 2}, **spec).start()
    first = plan_of(cluster)
    assert len(first.members) == 2
    sizes = [member.micro_batch_samples for member in first.members]
    assert abs(first.shares[0] - first.shares[1]) <= max(sizes)
    half = measured(cluster, {0: 0.01, 1: 0.03})
    cluster.telemetry = replace(half, observations=dict(list(half.observations.items())[:2]))
    cluster.settle()
    assert plan_of(cluster).shares == first.shares, "one member is not measured yet"
    cluster.telemetry = half
    cluster.settle()
    shares = plan_of(cluster).shares
    assert 2 < shares[0] / shares[1] < 4
    assert [member.micro_batch_samples for member in plan_of(cluster).members] == sizes


def test_planned_shares_stay_where_no_division_keeps_to_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory was planned; that of even shares was not."""
    profiles = {"a": profile("a", units_that_fit=4), "b": profile("b", units_that_fit=4, slowness=3.0)}
    pools = (pool("a", maxReplicas=2), pool("b", maxReplicas=2))
    cluster = a_cluster(*pools, profiles=profiles, elasticPolicy={"minReplicas": 2}).start()
    first = plan_of(cluster)
    assert len(first.members) == 2
    assert first.shares[0] != first.shares[1]
    odd = Infeasible(reason="the batch is odd")
    monkeypatch.setattr("heterotrain_operator.decide.plan.shares.shares_of_models", lambda *_given: odd)
    measurements = measured(cluster, {0: 0.01, 1: 0.03})
    cluster.telemetry = replace(measurements, profiles=profiles)
    cluster.settle()
    assert plan_of(cluster).shares == first.shares


def test_a_pipeline_s_speed_is_not_kept_as_that_of_a_worker() -> None:
    """The allocation between jobs multiplies speeds of workers."""
    alike = {"a": profile("a", units_that_fit=4)}
    cluster = a_cluster(pool("a", maxReplicas=2), profiles=alike).start()
    assert plan_of(cluster).members[0].compute is not None
    assert cluster.status["internal"]["pools"] == [{"name": "a", "exhaustedTries": 0, "exhaustedWhy": ""}]


@pytest.mark.parametrize("seed", range(times(gate=5, every=50)))
def test_random_losses_and_returns_leave_a_sound_plan(seed: int) -> None:
    """Each ready worker is in one member or a spare, the job settles, and it trains whenever a member can be formed."""
    rng = random.Random(seed)  # noqa: S311  # reproducible
    profiles = {
        name: profile(name, units_that_fit=rng.choice((1.2, 2.3, 3.4, 6.5)), slowness=rng.uniform(0.5, 4))
        for name in "abc"
    }
    pools = [pool(name, maxReplicas=rng.randint(1, 3), numProcPerWorker=rng.randint(1, 2)) for name in "abc"]
    cluster = a_cluster(*pools, profiles=profiles).start()
    for _ in range(6):
        names = sorted(cluster.pods)
        for name in rng.sample(names, rng.randint(0, min(2, len(names)))):
            cluster.vanish(name)
            if rng.random() < 0.5:
                cluster.settle()
        cluster.settle()
        if rng.random() < 0.7:
            cluster.schedule().run()
        cluster.pass_time(6).settle()
        plan = plan_of(cluster)
        if not plan.members:
            assert cluster.condition("LayoutPlanned")[0] == "False"
            continue
        ready = {view.name: view for view in cluster.pod_views if view.ready}
        devices = dict.fromkeys(profiles, 0)
        for view in ready.values():
            devices[view.pool] += view.ranks
        fits = sum(int(profiles[name].memory_bytes / (STATE + 2**22)) * count for name, count in devices.items())
        gone = {rank.worker for rank in plan.ranks} - set(ready)
        if fits >= UNITS:
            assert not gone, "a member with a lost rank is formed again where that is possible"
            assert {rank.worker for rank in plan.ranks} | set(plan.spares) == set(ready)
            assert sum(plan.shares) == 100
        else:
            assert cluster.condition("Running")[0] == "False" or not gone


def members_by_pools(cluster: FakeCluster) -> list[tuple[str, ...]]:
    """Return the pools of each member's stages."""
    plan = plan_of(cluster)
    return sorted(tuple(plan.pool_of(rank) for rank in ranks) for ranks in plan.ranks_by_member)


@pytest.mark.parametrize(("mbit_per_second", "is_mixed"), [(None, True), (10, False), (50_000, True)])
def test_stages_of_a_member_are_not_put_on_both_sides_of_a_slow_link(
    mbit_per_second: int | None, is_mixed: bool
) -> None:
    """A large and a small worker hold the model, two large ones as well, and two small ones do not.

    All four train, unless a mebibyte of each sample has to cross a slow link between the pools.
    """
    profiles = {"a": profile("a", units_that_fit=5.5), "b": profile("b", units_that_fit=2.5, slowness=2)}
    profiles = {
        name: replace(each, units=tuple(replace(unit, boundary_bytes=2**20) for unit in each.units))
        for name, each in profiles.items()
    }
    pair = {"between": ["b", "a"], "mbitPerSecond": mbit_per_second}
    cluster = a_cluster(
        pool("a", maxReplicas=2), pool("b", maxReplicas=2), profiles=profiles,
        parallelism={
            "mode": "Pipeline", "linkMbitPerSecond": 100_000, "links": [] if mbit_per_second is None else [pair]
        },
    ).start()  # fmt: skip
    found = members_by_pools(cluster)
    assert any(set(pools) == {"a", "b"} for pools in found) is is_mixed
    assert is_mixed or found == [("a", "a")]


def test_a_link_of_a_pool_without_a_profile_is_left_out() -> None:
    """Planned are the pools that have one; the others join later."""
    cluster = a_cluster(
        pool("a", maxReplicas=2), pool("c", maxReplicas=1), profiles={"a": profile("a", units_that_fit=3.5)},
        parallelism={"mode": "Pipeline", "links": [{"between": ["a", "c"], "mbitPerSecond": 10}]},
    ).start()  # fmt: skip
    cluster.pass_time(PROFILE_WAIT_S + 1).settle()
    assert members_by_pools(cluster) == [("a", "a")]
