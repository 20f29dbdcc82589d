"""Several jobs on one cluster: each gets its nodes, changes come to an end, and no job blocks another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import Binding, CommunicationTime, Plan, Prediction
from heterotrain_core.split.member import SplitMember
from heterotrain_operator.cluster_state.telemetry import ExchangeInForce, Telemetry
from heterotrain_operator.decide.allocation.allocate import (
    MOST_PRIORITIES,
    PRIORITY_FACTOR,
    AllocationProblem,
    priority_weights,
    problem_of,
)
from heterotrain_operator.decide.allocation.competition import takes_part
from heterotrain_operator.decide.learn.throughput import ThroughputModel, throughput_of
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen
from heterotrain_planner.perf.expected_maximum import balanced_ceiling
from support.fake_cluster import NOW_S, pool
from support.multi_job_cluster import MultiJobCluster, even_time

TWO = {"minReplicas": 2}


def a_cluster(*nodes: str, cpu: str = "1", seed: int = 0) -> MultiJobCluster:
    return MultiJobCluster(seed).with_nodes(*nodes, cpu=cpu)


def test_a_single_job_takes_what_fits_plus_one_waiting_worker() -> None:
    multi = a_cluster("a1", "a2", "a3")
    multi.add("one", pool("a", maxReplicas=8))
    multi.settle()
    assert multi.limits() == {"one": None}
    assert multi.placed() == {"one": {"a": 3}}
    assert multi.waiting("one") == 1
    assert multi.jobs["one"].condition("WorkersLimited") == ("False", "NotLimited")


def test_jobs_with_room_for_all_are_not_limited() -> None:
    multi = a_cluster("a", cpu="4")
    multi.add("one", pool("a", maxReplicas=2))
    multi.add("two", pool("a", maxReplicas=2))
    multi.settle()
    assert multi.limits() == {"one": None, "two": None}
    assert multi.placed() == {"one": {"a": 2}, "two": {"a": 2}}


def test_a_new_job_gets_its_part_from_a_job_that_uses_all_nodes() -> None:
    """Workers leave in order and do not count as disruptions; both jobs report the reasons."""
    multi = a_cluster("a", cpu="4")
    old = multi.add("old", pool("a", maxReplicas=4), elasticPolicy=TWO)
    multi.settle()
    assert len(old.members()) == 4
    new = multi.add("new", pool("a", maxReplicas=4), elasticPolicy=TWO)
    multi.settle()
    assert multi.placed() == {"old": {"a": 2}, "new": {"a": 2}}
    assert len(old.members()) == 2
    assert (old.status["disruptions"], old.status["restarts"]) == (0, 0)
    assert old.condition("WorkersLimited") == ("True", "NodesShared")
    assert "-2 a: other jobs need them more" in old.message("WorkersLimited")
    assert [p["granted"] for p in old.status["pools"]] == [2]
    assert "WorkersAllocated" in old.events
    assert "starts with 2 a" in new.message("WorkersLimited")
    multi.remove("new")
    multi.settle()
    assert multi.placed() == {"old": {"a": 4}}, "it takes the free nodes again"
    assert old.condition("WorkersLimited") == ("False", "NotLimited")


def test_a_job_whose_minimum_does_not_fit_next_to_running_ones_waits_without_nodes() -> None:
    multi = a_cluster("a", cpu="3")
    multi.add("old", pool("a", maxReplicas=3), elasticPolicy=TWO)
    multi.settle()
    new = multi.add("new", pool("a", maxReplicas=3), elasticPolicy=TWO)
    multi.settle()
    assert multi.placed() == {"old": {"a": 3}, "new": {}}
    assert new.condition("WorkersLimited") == ("True", "WaitingForNodes")
    assert "jobs before it leave fewer than its 2 workers" in new.message("Scheduled")
    assert multi.waiting("new") == 2, "its minimum waits, so that an autoscaler adds nodes"
    multi.with_nodes("a9", cpu="2").settle()
    assert multi.placed()["new"] == {"a": 2}
    assert len(new.members()) == 2


def test_a_gang_that_has_waited_long_starts_before_later_jobs() -> None:
    """Free nodes are kept for it after ten minutes, and later jobs say so."""
    multi = a_cluster("a", cpu="4")
    for name in ("early", "other"):
        multi.add(name, pool("a", maxReplicas=2), elasticPolicy=TWO)
    multi.settle()
    gang = multi.add("gang", pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 4})
    multi.settle()
    multi.now_s += 601.0
    late = multi.add("late", pool("a", maxReplicas=2), elasticPolicy=TWO)
    multi.remove("early")
    multi.settle()
    assert not late.members()
    assert "ns/gang came first and has waited for more than 10 minutes" in late.message("Scheduled")
    since = gang.message("WorkersLimited").partition("nodes are kept for it since ")[2].partition(";")[0]
    assert since
    multi.now_s += 100.0
    multi.settle()
    assert f"nodes are kept for it since {since}" in gang.message("WorkersLimited"), "it does not change"
    multi.remove("other")
    multi.settle()
    assert len(gang.members()) == 4
    assert multi.placed()["late"] == {}


def test_a_job_with_a_required_pool_without_nodes_takes_no_nodes_of_other_pools() -> None:
    """Training does not start below the pool's minimum, so workers of other pools would only wait."""
    multi = a_cluster("b", cpu="2")
    picky = multi.add("picky", pool("a", minReplicas=1), pool("b", maxReplicas=2))
    multi.add("other", pool("b", maxReplicas=2))
    multi.settle()
    assert multi.placed() == {"picky": {}, "other": {"b": 2}}
    assert "needs 1 worker in a, which holds 0" in picky.message("WorkersLimited")
    multi.with_nodes("a", cpu="1").settle()
    assert multi.placed() == {"picky": {"a": 1}, "other": {"b": 2}}
    assert picky.condition("Running")[0] == "True"


def test_two_jobs_that_start_together_do_not_block_each_other() -> None:
    """Three nodes, two jobs that need two workers each: one of them runs, whatever the scheduler places first."""
    for seed in range(8):
        multi = a_cluster("a", cpu="3", seed=seed)
        first = multi.add("first", pool("a", maxReplicas=2), elasticPolicy=TWO)
        multi.add("second", pool("a", maxReplicas=2), elasticPolicy=TWO)
        multi.settle()
        assert multi.placed()["first"] == {"a": 2}
        assert len(first.members()) == 2
        assert sum(multi.placed()["second"].values()) <= 1


def test_cost_takes_the_fewest_and_cheapest_workers_even_alone() -> None:
    multi = a_cluster("a", "b", cpu="4")
    job = multi.add(
        "cheap",
        pool("a", maxReplicas=4, pricePerHour="3.67"),
        pool("b", maxReplicas=4, pricePerHour="0.35"),
        elasticPolicy=TWO,
        objective="Cost",
    )
    multi.settle()
    assert multi.placed() == {"cheap": {"b": 2}}
    assert job.condition("WorkersLimited") == ("True", "FewerWorkersCheaper")
    assert multi.waiting("cheap") == 0
    assert job.status["pricePerHour"] == "0.70"


def test_a_worker_that_moves_leaves_once_its_replacement_is_ready() -> None:
    """A job with objective Cost moves to the cheaper pool as soon as that has nodes, and trains without a break."""
    multi = a_cluster("a")
    job = multi.add("cheap", pool("a", pricePerHour="3.67"), pool("b", pricePerHour="0.35"), objective="Cost")
    multi.settle()
    assert multi.placed() == {"cheap": {"a": 1}}
    multi.with_nodes("b", cpu="1")
    job.grant = multi.allocate()["cheap"]
    assert (job.grant.limits, len(job.grant.leave)) == ({"a": 0, "b": 1}, 1)
    job.settle()
    assert multi.waiting("cheap") == 1
    assert multi.placed() == {"cheap": {"a": 1}}, "it stays until its replacement is ready"
    multi.settle()
    assert multi.placed() == {"cheap": {"b": 1}}
    assert len(job.members()) == 1
    assert "0.35 instead of 3.67 an hour" in job.message("WorkersLimited")
    assert "TrainingInterrupted" not in job.events


def test_a_job_that_can_run_anywhere_makes_way_without_a_break() -> None:
    multi = a_cluster("a", "b")
    broad = multi.add("broad", pool("any", nodeSelector={}))
    multi.settle()
    (view,) = broad.pod_views
    narrow = multi.add("narrow", pool(view.node))
    multi.settle()
    assert multi.placed() == {"broad": {"any": 1}, "narrow": {view.node: 1}}
    assert "TrainingInterrupted" not in broad.events
    assert narrow.condition("Running")[0] == "True"


def test_no_worker_returns_to_a_place_that_was_freed_for_another_job() -> None:
    """Workers that fit anywhere come after those that fit on few nodes, whatever the scheduler places first."""
    for seed in range(6):
        multi = a_cluster("a1", "a2", "b", seed=seed)
        broad = multi.add("broad", pool("any", nodeSelector={}, maxReplicas=2))
        multi.settle()
        assert {view.node for view in broad.pod_views} == {"a1", "a2"}
        multi.add("narrow", pool("a"))
        making_way = multi.allocate()["broad"]
        assert (making_way.limits, len(making_way.leave)) == ({"any": 1}, 1), (
            "no replacement before narrow has its place"
        )
        multi.settle()
        assert multi.placed() == {"broad": {"any": 2}, "narrow": {"a": 1}}
        assert broad.events.count("WorkersRemoved") == 1
        assert broad.status["disruptions"] == 0


def test_no_worker_is_requested_that_would_make_the_job_slower() -> None:
    """The exchange takes ten times as long as computing, so one worker is faster than two: a place stays free."""
    multi = a_cluster("a", cpu="3")
    for name in ("one", "two"):
        job = multi.add(name, pool("a", maxReplicas=2))
        multi.speeds[name] = {"a": 1000.0}
        members = {"a": SplitMember(compute=even_time(1000.0))}
        exchange = CommunicationTime(last_bucket_s=1.0)
        throughput = ThroughputModel(members=members, communication=exchange, communication_members=2)
        job.model = replace(job.model, throughput=throughput)
    multi.settle()
    assert multi.placed() == {"one": {"a": 1}, "two": {"a": 1}}
    assert (multi.waiting("one"), multi.waiting("two")) == (0, 0)


def test_a_granted_worker_counts_while_it_waits_for_its_node() -> None:
    """Otherwise the last of many workers would be cancelled, because it is not worth its cost alone."""
    multi = a_cluster("a", cpu="4")
    for name in ("one", "two"):
        multi.add(name, pool("a", maxReplicas=4))
    for name, grant in multi.allocate().items():
        multi.jobs[name].grant = grant
        multi.jobs[name].settle()
    assert (multi.waiting("one"), multi.waiting("two")) == (2, 2)
    (competition,) = multi.competitions()
    problem = problem_of(competition, now_s=NOW_S)
    assert [sum(demand.current.values()) for demand in problem.demands] == [2, 2]


def test_a_grant_is_remembered_until_it_is_carried_out_and_a_new_job_is_measured_soon() -> None:
    multi = a_cluster("a", cpu="4")
    for name in ("one", "two"):
        multi.add(name, pool("a", maxReplicas=4))

    def problem(*, after_s: float) -> AllocationProblem:
        (competition,) = multi.competitions()
        return problem_of(competition, now_s=NOW_S + after_s)

    assert [dict(demand.granted) for demand in problem(after_s=0).demands] == [{}, {}]
    for name, grant in multi.allocate().items():
        multi.jobs[name].grant = grant
    demands = problem(after_s=0).demands
    assert [list(demand.granted.values()) for demand in demands] == [[2], [2]]
    assert all(set(demand.granted) <= {each.key for each in demand.pools} for demand in demands)
    assert [demand.measured_soon for demand in demands] == [True, True]
    multi.settle()
    assert [dict(demand.granted) for demand in problem(after_s=0).demands] == [{}, {}], "they have their workers"
    late = [demand.measured_soon for demand in problem(after_s=3600).demands]
    assert late == [False, False]


def test_the_speed_of_a_pool_is_kept_when_its_workers_are_gone() -> None:
    multi = a_cluster("a", "b", cpu="2")
    job = multi.add("one", pool("a", maxReplicas=2), pool("b", maxReplicas=2))
    multi.speeds["one"] = {"a": 100.0, "b": 400.0}
    multi.settle()
    del multi.nodes["b"]
    multi.settle()
    assert {member["pool"] for member in job.plan_json["members"]} == {"a"}
    speeds = {name: member.compute for name, member in job.model.throughput.members.items()}
    assert speeds == {"a": even_time(100.0), "b": even_time(400.0)}


def test_losses_of_a_pool_are_counted_and_make_it_worth_less() -> None:
    """The pool counts a worker that the cloud has removed, and its node group then promises shorter stays."""
    multi = a_cluster("a", "b")
    job = multi.add("one", pool("a", capacityType="Spot"), pool("b"))
    multi.add("two", pool("a", capacityType="Spot"), pool("b"))
    multi.settle()
    (mine,) = multi.placed()["one"]
    job.end("one-w0", exit_code=137, pod_reason="Terminated")
    multi.settle()
    (row,) = (each for each in job.status["pools"] if each["name"] == mine)
    assert row["disruptions"] == 1
    (competition,) = multi.competitions()
    problem = problem_of(competition, now_s=NOW_S)
    losses = {each.name: each.losses for each in problem.capacity.pools.values()}
    assert losses == {"a": float(mine == "a"), "b": float(mine == "b")}
    assert {each.name: each.spot for each in problem.capacity.pools.values()} == {"a": True, "b": False}


def test_jobs_that_are_suspended_refused_or_over_take_no_part() -> None:
    multi = a_cluster("a", cpu="4")
    one = multi.add("one", pool("a", maxReplicas=4))
    multi.add("two", pool("a", maxReplicas=4))
    multi.settle()
    assert takes_part(one.job_view)
    one.edit(lambda spec: spec.update(suspend=True))
    assert not takes_part(one.job_view)
    multi.settle()
    assert multi.placed() == {"one": {}, "two": {"a": 4}}


def test_workers_on_cordoned_nodes_stay_and_count() -> None:
    """A worker does not have to leave only because its node takes no more workers."""
    multi = a_cluster("a1", "a2", cpu="2")
    multi.add("one", pool("a", maxReplicas=4))
    multi.settle()
    multi.nodes["a1"]["spec"]["unschedulable"] = True
    multi.add("two", pool("a", maxReplicas=4))
    multi.settle()
    assert multi.placed() == {"one": {"a": 3}, "two": {"a": 1}}


def test_a_new_operator_changes_nothing() -> None:
    multi = a_cluster("a", "b", cpu="4")
    for number, name in enumerate(("x", "y", "z")):
        multi.add(name, pool("a", maxReplicas=4), pool("b", maxReplicas=1 + number), elasticPolicy={"minReplicas": 1})
    multi.settle()
    before = multi.placed(), multi.limits()
    multi.keeps_grants = False
    multi.settle()
    assert (multi.placed(), multi.limits()) == before


def test_a_job_of_another_namespace_gets_no_nodes_by_its_minimum_beyond_its_share() -> None:
    cluster = a_cluster("a", "a2", "a3", "a4", cpu="1")
    cluster.add("trains", pool("a", maxReplicas=4))
    cluster.settle()
    greedy = cluster.add("greedy", pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 3})
    greedy.job["metadata"]["namespace"] = "neighbour"
    cluster.settle()
    assert len(cluster.jobs["trains"].members()) == 4
    assert greedy.condition("WorkersLimited") == ("True", "WaitingForNodes")
    assert "minimum of 3 workers is more than the 2 of 4" in greedy.message("WorkersLimited")
    greedy.edit(lambda spec: spec["elasticPolicy"].update(minReplicas=2))
    cluster.settle()
    assert (len(cluster.jobs["trains"].members()), len(greedy.members())) == (2, 2)


def jobs_of_two_priorities(*, most: int = 4) -> MultiJobCluster:
    """Return four places that the job ``low`` has, and a later job ``high`` that wants all of them."""
    multi = MultiJobCluster().with_nodes("a1", "a2", "a3", "a4", cpu="1")
    multi.priorities = {"high": 1000}
    multi.add("low", pool("a", maxReplicas=4))
    multi.settle()
    assert multi.placed() == {"low": {"a": 4}}
    multi.add("high", pool("a", maxReplicas=most))
    return multi


def test_a_job_of_higher_priority_gets_more_of_the_same_nodes() -> None:
    multi = jobs_of_two_priorities().settle()
    assert multi.placed() == {"low": {"a": 1}, "high": {"a": 3}}, "a running job keeps its minimum"


def test_of_two_waiting_jobs_the_one_of_higher_priority_starts() -> None:
    multi = MultiJobCluster().with_nodes("a1", "a2", cpu="1")
    multi.priorities = {"high": 1000}
    for name in ("low", "high"):
        multi.add(name, pool("a", maxReplicas=2), elasticPolicy={"minReplicas": 2})
    multi.settle()
    assert multi.placed() == {"low": {}, "high": {"a": 2}}


def test_no_worker_waits_where_the_scheduler_would_end_one_of_lower_priority_for_it() -> None:
    multi = jobs_of_two_priorities().settle()
    assert [view.name for view in multi.jobs["high"].pod_views if not view.node] == []
    assert [view.name for view in multi.jobs["low"].pod_views if not view.node] != [], "it asks for further nodes"


def test_only_the_order_of_priorities_counts_and_weights_are_bounded() -> None:
    assert priority_weights({0, 5, 2_000_000_000}) == {0: 1.0, 5: 10.0, 2_000_000_000: 100.0}
    assert priority_weights({7}) == {7: 1.0}
    many = priority_weights(set(range(-50, 50)))
    assert max(many.values()) == PRIORITY_FACTOR ** (MOST_PRIORITIES - 1)
    assert [many[priority] for priority in range(-50, 50)] == sorted(many.values())


def test_the_exchange_is_remembered_by_the_number_of_members() -> None:
    multi = a_cluster("a", cpu="4")
    job = multi.add("one", pool("a", maxReplicas=4))
    multi.settle()
    plan = decode_plan(json.dumps(job.plan_json), job_uid="uid-of-one")
    assert isinstance(plan, Plan)
    before = ThroughputModel(exchange_seen=(ExchangeSeen(members=2, across=True, seconds=0.1, steps=90),))

    def after(generation: int, steps: int, known: ThroughputModel = before) -> ThroughputModel:
        return throughput_of(known, plan, Telemetry(exchange=ExchangeInForce(generation, 0.3, steps)))

    present = ExchangeSeen(members=len(plan.members), across=True, seconds=0.3, steps=40)
    found = after(plan.generation, 40)
    assert found.exchange_seen == (*before.exchange_seen, present)
    assert after(plan.generation, 45, found).exchange_seen == found.exchange_seen, "equal values do not change again"
    assert after(plan.generation - 1, 40).exchange_seen == before.exchange_seen, "measured with other members"
    assert after(plan.generation, 3).exchange_seen == before.exchange_seen, "too few steps"


def test_the_long_steps_of_a_plan_hold_for_other_numbers_of_workers() -> None:
    """The variation is what the ceiling of three members has beyond them."""
    multi = a_cluster("a", cpu="3")
    job = multi.add("one", pool("a", minReplicas=3, maxReplicas=3))
    multi.settle()
    plan = decode_plan(json.dumps(job.plan_json), job_uid="uid-of-one")
    assert isinstance(plan, Plan)
    hiccups = Hiccups(rate=0.01, pause_s=0.4)
    bindings = (Binding.COMPUTE,) * len(plan.members)
    for own_noise in (0.0, 0.05):
        expected = balanced_ceiling([own_noise] * len(plan.members), hiccups.relative_to(0.2))
        prediction = Prediction(
            step_s=0.2, efficiency=0.9, efficiency_ceiling=expected, bindings=bindings, hiccups=hiccups, own_s=0.2
        )
        found = throughput_of(ThroughputModel(), replace(plan, prediction=prediction), Telemetry())
        assert found.hiccups == hiccups
        assert found.variation == pytest.approx(own_noise, abs=2e-3)


def test_the_allocation_expects_the_exchange_that_growth_has_shown() -> None:
    """With a long latency of each round, three workers are slower than two; the data that a ring moves hide that."""
    seen = tuple(ExchangeSeen(members=n, across=True, seconds=0.02 * (n - 1), steps=100) for n in (3, 2))
    for sizes, workers in (((), 5), (seen, 4)):
        multi = a_cluster("a", cpu="5")
        for name in ("one", "two"):
            job = multi.add(name, pool("a", maxReplicas=4))
            multi.speeds[name] = {"a": 1000.0}
            throughput = ThroughputModel(
                members={"a": SplitMember(compute=even_time(1000.0))},
                communication=CommunicationTime(last_bucket_s=0.02),
                communication_members=2,
                exchange_seen=sizes,
            )
            job.model = replace(job.model, throughput=throughput)
        multi.settle()
        assert sum(placed["a"] for placed in multi.placed().values()) == workers
