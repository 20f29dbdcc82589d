"""Several jobs on one cluster: who gets which nodes, that it comes to rest, and that nobody is ever in another's way."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.split.curve import SplitMember
from heterotrain_operator.decide.allocation import DRY_S, RETRY_S, question_of
from heterotrain_operator.decide.allotment import Learned
from heterotrain_operator.decide.contest import takes_part
from heterotrain_operator.world.parse import rfc3339
from operator_town import Town, even_time
from operator_world import NOW_S, World, pool

TWO = {"minReplicas": 2}


def a_town(*nodes: str, cpu: str = "1", seed: int = 0) -> Town:
    return Town(seed).with_nodes(*nodes, cpu=cpu)


def test_a_job_alone_takes_what_fits_and_one_that_waits_as_if_there_were_no_allocation() -> None:
    town = a_town("a1", "a2", "a3")
    town.add("one", pool("a", maxReplicas=8))
    town.settle()
    assert town.limits() == {"one": None}
    assert town.placed() == {"one": {"a": 3}}
    assert town.waiting("one") == 1
    assert town.worlds["one"].condition("Limited") == ("False", "Free")


def test_jobs_with_room_for_all_are_not_limited() -> None:
    town = a_town("a", cpu="4")
    town.add("one", pool("a", maxReplicas=2))
    town.add("two", pool("a", maxReplicas=2))
    town.settle()
    assert town.limits() == {"one": None, "two": None}
    assert town.placed() == {"one": {"a": 2}, "two": {"a": 2}}


def test_a_newcomer_gets_its_part_from_a_job_that_has_everything() -> None:
    """Workers leave in order and are not charged; the reasons are told to people."""
    town = a_town("a", cpu="4")
    old = town.add("old", pool("a", maxReplicas=4), elasticPolicy=TWO)
    town.settle()
    assert len(old.members()) == 4
    new = town.add("new", pool("a", maxReplicas=4), elasticPolicy=TWO)
    town.settle()
    assert town.placed() == {"old": {"a": 2}, "new": {"a": 2}}
    assert len(old.members()) == 2
    assert (old.status["disruptions"], old.status["restarts"]) == (0, 0)
    assert old.condition("Limited") == ("True", "NodesShared")
    assert "-2 a: other jobs need them more" in old.message("Limited")
    assert [p["granted"] for p in old.status["pools"]] == [2]
    assert "WorkersAllocated" in old.notices
    assert "starts with 2 a" in new.message("Limited")
    town.remove("new")
    town.settle()
    assert town.placed() == {"old": {"a": 4}}, "it takes back what is free"
    assert "nobody else wants its nodes" in old.message("Limited") or old.condition("Limited") == ("False", "Free")


def test_a_gang_that_does_not_fit_beside_running_minimums_waits_and_holds_nothing() -> None:
    town = a_town("a", cpu="3")
    town.add("old", pool("a", maxReplicas=3), elasticPolicy=TWO)
    town.settle()
    new = town.add("new", pool("a", maxReplicas=3), elasticPolicy=TWO)
    town.settle()
    assert town.placed() == {"old": {"a": 3}, "new": {}}
    assert new.condition("Limited") == ("True", "WaitsForNodes")
    assert "jobs before it leave less than its 2 workers" in new.message("Scheduled")
    assert town.waiting("new") == 2, "it asks for its minimum, so that an autoscaler adds nodes"
    town.with_nodes("a9", cpu="2").settle()
    assert town.placed()["new"] == {"a": 2}
    assert len(new.members()) == 2


def test_a_job_whose_pool_has_no_nodes_holds_none_of_another_pool_either() -> None:
    """Training does not start without the pool's minimum, so its workers elsewhere would only wait; later it goes on without."""
    town = a_town("b", cpu="2")
    picky = town.add("picky", pool("a", minReplicas=1), pool("b", maxReplicas=2))
    town.add("other", pool("b", maxReplicas=2))
    town.settle()
    assert town.placed() == {"picky": {}, "other": {"b": 2}}
    assert "needs 1 worker in a, which holds 0" in picky.message("Limited")
    town.with_nodes("a", cpu="1").settle()
    assert town.placed() == {"picky": {"a": 1}, "other": {"b": 2}}
    assert picky.condition("Running")[0] == "True"


def test_two_gangs_that_start_together_do_not_block_each_other() -> None:
    """Three nodes, two jobs that need two workers each: one of them runs, whatever the scheduler does first."""
    for seed in range(8):
        town = a_town("a", cpu="3", seed=seed)
        first = town.add("first", pool("a", maxReplicas=2), elasticPolicy=TWO)
        town.add("second", pool("a", maxReplicas=2), elasticPolicy=TWO)
        town.settle()
        assert town.placed()["first"] == {"a": 2}
        assert len(first.members()) == 2
        assert sum(town.placed()["second"].values()) <= 1


def test_cost_takes_the_fewest_and_cheapest_workers_even_alone() -> None:
    town = a_town("a", "b", cpu="4")
    job = town.add(
        "thrifty",
        pool("a", maxReplicas=4, pricePerHour="3.67"),
        pool("b", maxReplicas=4, pricePerHour="0.35"),
        elasticPolicy=TWO,
        objective="cost",
    )
    town.settle()
    assert town.placed() == {"thrifty": {"b": 2}}
    assert job.condition("Limited") == ("True", "FewerAreCheaper")
    assert town.waiting("thrifty") == 0
    assert job.status["pricePerHour"] == "0.70"


def test_a_pool_that_gives_nothing_for_long_goes_to_others_and_is_tried_again() -> None:
    """Something that we cannot see keeps the scheduler from placing a job on pool b, although there seems to be room."""
    town = a_town("a").with_nodes("b", cpu="3")
    blocked = town.add("blocked", pool("a"), pool("b", maxReplicas=3))
    town.add("other", pool("b", maxReplicas=3))
    schedule = blocked.schedule

    def nowhere_on_b() -> World:
        before = set(town.placed_pods("blocked"))
        schedule()
        for name in set(town.placed_pods("blocked")) - before:
            body = blocked.pods[name]
            if body["spec"]["nodeName"] == "b":
                del body["spec"]["nodeName"]
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "a volume"}
                body["status"]["conditions"] = [{**refused, "lastTransitionTime": rfc3339(town.now_s)}]
        return blocked

    blocked.schedule = nowhere_on_b  # type: ignore[method-assign]  # a fault that only the scheduler sees
    town.settle()
    assert town.limits() == {"blocked": {"a": 1, "b": 1}, "other": {"b": 2}}
    town.now_s += DRY_S
    town.settle()
    assert town.placed() == {"blocked": {"a": 1}, "other": {"b": 3}}, "the node is used all the same"
    assert set(blocked.allotment.dry) == {"b"}
    assert "pool b: a volume" in blocked.message("Degraded")
    since = {each["name"]: each.get("outOfStockSince") for each in blocked.status["pools"]}
    assert since == {"a": None, "b": rfc3339(blocked.allotment.dry["b"].since_s)}
    town.remembers = False
    town.settle()
    assert town.placed() == {"blocked": {"a": 1}, "other": {"b": 3}}, "a new operator need not find it out again"
    town.remembers = True
    blocked.schedule = schedule  # type: ignore[method-assign]  # the fault is over
    town.now_s += RETRY_S
    town.settle()
    assert town.placed() == {"blocked": {"a": 1, "b": 1}, "other": {"b": 2}}
    assert not blocked.allotment.dry


def test_who_has_to_move_leaves_when_his_successor_is_ready() -> None:
    """A thrifty job moves to the cheaper pool as soon as that has nodes, and trains all the while."""
    town = a_town("a")
    job = town.add("thrifty", pool("a", pricePerHour="3.67"), pool("b", pricePerHour="0.35"), objective="cost")
    town.settle()
    assert town.placed() == {"thrifty": {"a": 1}}
    town.with_nodes("b", cpu="1")
    job.allotment = town.allocate()["thrifty"]
    assert (job.allotment.limits, len(job.allotment.leave)) == ({"a": 0, "b": 1}, 1)
    job.settle()
    assert town.waiting("thrifty") == 1
    assert town.placed() == {"thrifty": {"a": 1}}, "it stays while its successor is on the way"
    town.settle()
    assert town.placed() == {"thrifty": {"b": 1}}
    assert len(job.members()) == 1
    assert "0.35 instead of 3.67 an hour" in job.message("Limited")
    assert "TrainingInterrupted" not in job.notices


def test_a_job_that_can_run_anywhere_makes_way_without_a_break() -> None:
    town = a_town("a", "b")
    broad = town.add("broad", pool("any", nodeSelector={}))
    town.settle()
    (view,) = broad.pod_views
    narrow = town.add("narrow", pool(view.node))
    town.settle()
    assert town.placed() == {"broad": {"any": 1}, "narrow": {view.node: 1}}
    assert "TrainingInterrupted" not in broad.notices
    assert narrow.condition("Running")[0] == "True"


def test_nobody_comes_back_to_a_place_that_was_made_free_for_another() -> None:
    """Workers that may run anywhere come after those who may not, whomever the scheduler takes first."""
    for seed in range(6):
        town = a_town("a1", "a2", "b", seed=seed)
        broad = town.add("broad", pool("any", nodeSelector={}, maxReplicas=2))
        town.settle()
        assert {view.node for view in broad.pod_views} == {"a1", "a2"}
        town.add("narrow", pool("a"))
        making_way = town.allocate()["broad"]
        assert (making_way.limits, len(making_way.leave)) == ({"any": 1}, 1), "no successor before narrow has its place"
        town.settle()
        assert town.placed() == {"broad": {"any": 2}, "narrow": {"a": 1}}
        assert broad.notices.count("WorkersRemoved") == 1
        assert broad.status["disruptions"] == 0


def test_no_worker_is_asked_for_where_one_more_would_only_be_in_the_way() -> None:
    """With an exchange that takes ten times as long as computing, one worker is faster than two: the third place stays free."""
    town = a_town("a", cpu="3")
    for name in ("one", "two"):
        job = town.add(name, pool("a", maxReplicas=2))
        town.speeds[name] = {"a": 1000.0}
        members = {"a": SplitMember(compute=even_time(1000.0))}
        exchange = CommunicationTime(last_bucket_s=1.0)
        learned = Learned(members=members, communication=exchange, communication_members=2)
        job.allotment = replace(job.allotment, learned=learned)
    town.settle()
    assert town.placed() == {"one": {"a": 1}, "two": {"a": 1}}
    assert (town.waiting("one"), town.waiting("two")) == (0, 0)


def test_what_is_granted_counts_as_there_while_it_waits_for_its_node() -> None:
    """Otherwise the last of many workers would be called off, because alone it does not pay."""
    town = a_town("a", cpu="4")
    for name in ("one", "two"):
        town.add(name, pool("a", maxReplicas=4))
    for name, allotment in town.allocate().items():
        town.worlds[name].allotment = allotment
        town.worlds[name].settle()
    assert (town.waiting("one"), town.waiting("two")) == (2, 2)
    (contest,) = town.contests()
    question = question_of(contest, {bidder.job.key: Learned() for bidder in contest.bidders}, now_s=NOW_S)
    assert [sum(demand.current.values()) for demand in question.demands] == [2, 2]


def test_how_fast_a_pool_was_is_remembered_when_its_workers_have_gone() -> None:
    town = a_town("a", "b", cpu="2")
    job = town.add("one", pool("a", maxReplicas=2), pool("b", maxReplicas=2))
    town.speeds["one"] = {"a": 100.0, "b": 400.0}
    town.settle()
    del town.nodes["b"]
    town.settle()
    assert {member["pool"] for member in job.plan_json["members"]} == {"a"}
    speeds = {name: member.compute for name, member in job.allotment.learned.members.items()}
    assert speeds == {"a": even_time(100.0), "b": even_time(400.0)}


def test_losses_of_a_pool_are_counted_and_make_it_worth_less() -> None:
    """A worker that the cloud took is remembered by its pool; the ground then promises shorter stays."""
    town = a_town("a", "b")
    job = town.add("one", pool("a", capacityType="spot"), pool("b"))
    town.add("two", pool("a", capacityType="spot"), pool("b"))
    town.settle()
    (mine,) = town.placed()["one"]
    job.end("one-w0", exit_code=137, pod_reason="Terminated")
    town.settle()
    (row,) = (each for each in job.status["pools"] if each["name"] == mine)
    assert row["disruptions"] == 1
    (contest,) = town.contests()
    question = question_of(contest, {bidder.job.key: Learned() for bidder in contest.bidders}, now_s=NOW_S)
    losses = {each.name: each.losses for each in question.pools}
    assert losses == {"a": float(mine == "a"), "b": float(mine == "b")}
    assert {each.name: each.spot for each in question.pools} == {"a": True, "b": False}


def test_jobs_that_are_suspended_refused_or_over_take_no_part() -> None:
    town = a_town("a", cpu="4")
    one = town.add("one", pool("a", maxReplicas=4))
    town.add("two", pool("a", maxReplicas=4))
    town.settle()
    assert takes_part(one.job_view)
    one.edit(lambda spec: spec.update(suspend=True))
    assert not takes_part(one.job_view)
    town.settle()
    assert town.placed() == {"one": {}, "two": {"a": 4}}


def test_workers_on_cordoned_nodes_stay_and_count() -> None:
    """Nobody is moved only because his node takes no more workers."""
    town = a_town("a1", "a2", cpu="2")
    town.add("one", pool("a", maxReplicas=4))
    town.settle()
    town.nodes["a1"]["spec"]["unschedulable"] = True
    town.add("two", pool("a", maxReplicas=4))
    town.settle()
    assert town.placed() == {"one": {"a": 3}, "two": {"a": 1}}


def test_a_new_operator_that_remembers_nothing_changes_nothing() -> None:
    town = a_town("a", "b", cpu="4")
    for number, name in enumerate(("x", "y", "z")):
        town.add(name, pool("a", maxReplicas=4), pool("b", maxReplicas=1 + number), elasticPolicy={"minReplicas": 1})
    town.settle()
    before = town.placed(), town.limits()
    town.remembers = False
    town.settle()
    assert (town.placed(), town.limits()) == before
