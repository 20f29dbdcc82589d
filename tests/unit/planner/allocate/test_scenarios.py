"""The scenario table: cluster, jobs, each job's workers and the reason. A changed rule shows as a changed row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.allocate.capacity import PoolCapacity
from heterotrain_planner.allocate.problem import JobDemand, JobPool, Objective, Pool
from heterotrain_planner.allocate.propose import propose

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def member(samples_per_s: float, *, fixed_s: float = 0.01) -> SplitMember:
    """Return a rank of this speed."""
    third = 1 / samples_per_s / 3
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=third, fixed_s=fixed_s, backward_per_sample_s=2 * third, backward_fixed_s=fixed_s
        )
    )


A100 = JobPool(pool="a100", max_workers=4, price_per_hour=3.67, member=member(800))
V100 = JobPool(pool="v100", max_workers=4, price_per_hour=2.48, member=member(400))
T4 = JobPool(pool="t4-spot", max_workers=8, price_per_hour=0.35, member=member(200))
EXCHANGE = CommunicationTime(overlapped_s=0.05, last_bucket_s=0.02, gamma=0.2)


def a_job(key: str = "digits", **more: object) -> JobDemand:
    """Return a job that may use A100, V100 and spot T4, two to eight workers, with 4,096 samples a step."""
    values: dict[str, object] = {
        "pools": (A100, V100, T4),
        "min_workers": 2,
        "max_workers": 8,
        "batch_samples": 4096,
        "communication": EXCHANGE,
        "communication_members": 4,
    }
    return JobDemand(key=key, **{**values, **more})  # type: ignore[arg-type]  # tests pass what they mean


def a_pool(name: str, count: int, **more: object) -> Pool:
    """Return a pool of nodes with one accelerator each."""
    return Pool(name=name, nodes=(1,) * count, spot="spot" in name, **more)  # type: ignore[arg-type]  # as above


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named case; ``expected`` by job, ``words`` that its reason has to hold."""

    name: str
    pools: tuple[Pool, ...]
    jobs: tuple[JobDemand, ...]
    expected: Mapping[str, Mapping[str, int]]
    words: Mapping[str, str] = field(default_factory=dict)


CLUSTER = (a_pool("a100", 2), a_pool("v100", 2), a_pool("t4-spot", 8))
SCENARIOS = [
    Scenario(
        name="alone on a free cluster: the fastest eight workers across all pools",
        pools=CLUSTER,
        jobs=(a_job(),),
        expected={"digits": {"a100": 2, "v100": 2, "t4-spot": 4}},
        words={"digits": "starts with"},
    ),
    Scenario(
        name="speeds unknown: as many workers as allowed, in the order of the job_pools where all count alike",
        pools=CLUSTER,
        jobs=(a_job(pools=tuple(replace(o, member=None) for o in (A100, V100, T4)), max_workers=12),),
        expected={"digits": {"a100": 2, "v100": 2, "t4-spot": 8}},
    ),
    Scenario(
        name="gang: with less than its minimum it does not run at all",
        pools=(a_pool("a100", 1),),
        jobs=(a_job(),),
        expected={"digits": {}},
        words={"digits": "needs 2 workers and its pools hold 1"},
    ),
    Scenario(
        name="out of stock: the other pools serve, and the minimum of the exhausted pool is waived",
        pools=(a_pool("a100", 0, growth=(1, 1), out_of_stock=True), a_pool("t4-spot", 4)),
        jobs=(a_job(pools=(replace(A100, min_workers=1), T4)),),
        expected={"digits": {"t4-spot": 4}},
    ),
    Scenario(
        name="out of stock, and the job does not run without: it waits and takes nothing",
        pools=(a_pool("a100", 0, growth=(1, 1), out_of_stock=True), a_pool("t4-spot", 4)),
        jobs=(a_job(pools=(replace(A100, min_workers=1, required=True), T4)),),
        expected={"digits": {}},
        words={"digits": "needs 1 worker in a100, which holds 0"},
    ),
    Scenario(
        name="out of stock and nothing else: it waits and says which pool is exhausted",
        pools=(a_pool("a100", 0, growth=(1, 1), out_of_stock=True),),
        jobs=(a_job(pools=(A100,)),),
        expected={"digits": {}},
        words={"digits": "a100 out of stock"},
    ),
    Scenario(
        name="back in stock: it returns, because that pays for the pause",
        pools=(a_pool("a100", 0, growth=(1, 1)), a_pool("t4-spot", 4)),
        jobs=(a_job(pools=(A100, T4), current={"t4-spot": 4}, pause_s=30.0),),
        expected={"digits": {"a100": 2, "t4-spot": 4}},
        words={"digits": "pays for a pause of 30 s"},
    ),
    Scenario(
        name="back in stock, but done before the pause is earned back",
        pools=(a_pool("a100", 0, growth=(1, 1)), a_pool("t4-spot", 4)),
        jobs=(a_job(pools=(A100, T4), current={"t4-spot": 4}, pause_s=30.0, remaining_samples=20_000.0),),
        expected={"digits": {"t4-spot": 4}},
        words={"digits": "stays with 4 t4-spot"},
    ),
    Scenario(
        name="a pool that loses a worker every few minutes does not earn back a long pause",
        pools=(a_pool("a100", 2), a_pool("t4-spot", 4, losses=200, watched_s=4 * 6 * HOUR_S)),
        jobs=(a_job(pools=(A100, T4), current={"a100": 2}, pause_s=120.0),),
        expected={"digits": {"a100": 2}},
    ),
    Scenario(
        name="the same pool in quiet times does",
        pools=(a_pool("a100", 2), a_pool("t4-spot", 4, losses=1, watched_s=10 * DAY_S)),
        jobs=(a_job(pools=(A100, T4), current={"a100": 2}, pause_s=120.0),),
        expected={"digits": {"a100": 2, "t4-spot": 4}},
    ),
    Scenario(
        name="cost: the fewest dollars a sample, its minimum on the cheapest pool",
        pools=CLUSTER,
        jobs=(a_job(objective=Objective.COST),),
        expected={"digits": {"t4-spot": 2}},
    ),
    Scenario(
        name="cost, running on dear machines: it moves, and the price is in the reason",
        pools=CLUSTER,
        jobs=(a_job(objective=Objective.COST, current={"a100": 2}),),
        expected={"digits": {"t4-spot": 2}},
        words={"digits": "0.7 instead of 7.34 an hour"},
    ),
    Scenario(
        name="deadline: the cheapest that is in time, not the fastest",
        pools=CLUSTER,
        jobs=(a_job(objective=Objective.DEADLINE, remaining_samples=800.0 * HOUR_S, deadline_s=HOUR_S),),
        expected={"digits": {"t4-spot": 5}},
    ),
    Scenario(
        name="deadline out of reach: as fast as can be, and it says so",
        pools=CLUSTER,
        jobs=(a_job(objective=Objective.DEADLINE, remaining_samples=1e9, deadline_s=HOUR_S),),
        expected={"digits": {"a100": 2, "v100": 2, "t4-spot": 4}},
        words={"digits": "too late for its deadline"},
    ),
    Scenario(
        name="fairness: two equal jobs get equal parts, whoever came first",
        pools=(a_pool("t4-spot", 6),),
        jobs=(a_job("a", arrived_s=5.0), a_job("b")),
        expected={"a": {"t4-spot": 3}, "b": {"t4-spot": 3}},
    ),
    Scenario(
        name="a newcomer: the running job shrinks to let it run, and is not stopped",
        pools=(a_pool("a100", 4),),
        jobs=(a_job("old", pools=(A100,), current={"a100": 4}), a_job("new", pools=(A100,), arrived_s=9.0)),
        expected={"old": {"a100": 2}, "new": {"a100": 2}},
        words={"old": "-2 a100: other jobs need them more"},
    ),
    Scenario(
        name="no room beside a running job's minimum: the newcomer waits",
        pools=(a_pool("a100", 3),),
        jobs=(a_job("old", pools=(A100,), current={"a100": 3}), a_job("new", pools=(A100,), arrived_s=9.0)),
        expected={"old": {"a100": 3}, "new": {}},
        words={"new": "jobs before it leave fewer than its 2 workers"},
    ),
    Scenario(
        name="running comes before waiting, even before what has waited for longer",
        pools=(a_pool("a100", 3),),
        jobs=(a_job("old", pools=(A100,)), a_job("new", pools=(A100,), arrived_s=9.0, current={"a100": 3})),
        expected={"old": {}, "new": {"a100": 3}},
    ),
    Scenario(
        name="two pools of one speed: the one that loses fewer workers",
        pools=(a_pool("a100", 2, losses=40, watched_s=2 * DAY_S), Pool(name="b100", nodes=(1, 1), watched_s=2 * DAY_S)),
        jobs=(a_job(pools=(replace(A100, pool="b100"), A100), max_workers=2, pause_s=60.0),),
        expected={"digits": {"b100": 2}},
    ),
    Scenario(
        name="weight: the weightier job runs first, even before one that runs",
        pools=(a_pool("a100", 3),),
        jobs=(a_job("old", pools=(A100,), current={"a100": 3}), a_job("new", pools=(A100,), weight=2.0)),
        expected={"old": {}, "new": {"a100": 3}},
    ),
    Scenario(
        name="first come: of three that fit only twice, the last waits",
        pools=(a_pool("a100", 4),),
        jobs=tuple(a_job(key, pools=(A100,), arrived_s=float(i)) for i, key in enumerate(("c", "b", "a"))),
        expected={"c": {"a100": 2}, "b": {"a100": 2}, "a": {}},
    ),
    Scenario(
        name="four ranks in one pod need a whole node: six accelerators on three nodes hold one of them",
        pools=(Pool(name="a100", nodes=(4, 1, 1)),),
        jobs=(a_job(pools=(replace(A100, accelerators=4, ranks=4),), min_workers=1),),
        expected={"digits": {"a100": 1}},
    ),
    Scenario(
        name="a small batch: more workers only cost, so it takes what helps",
        pools=CLUSTER,
        jobs=(a_job(batch_samples=32, pools=(A100, replace(T4, member=member(200, fixed_s=0.05)))),),
        expected={"digits": {"a100": 2}},
    ),
    Scenario(
        name="a batch that no allowed number of workers can share",
        pools=CLUSTER,
        jobs=(a_job(batch_samples=1),),
        expected={"digits": {}},
        words={"digits": "can share a batch of 1 samples"},
    ),
    Scenario(
        name="goodput: with little noise in its gradients a job leaves its larger batches, and workers, alone",
        pools=CLUSTER,
        jobs=(
            a_job(
                objective=Objective.GOODPUT,
                batch_samples=64,
                largest_batch_samples=4096,
                noise_samples=20.0,
                pools=(replace(A100, member=member(800, fixed_s=0.001)), T4),
            ),
        ),
        expected={"digits": {"a100": 2}},
    ),
    Scenario(
        name="goodput: with much noise it takes everything",
        pools=CLUSTER,
        jobs=(
            a_job(
                objective=Objective.GOODPUT,
                batch_samples=64,
                largest_batch_samples=4096,
                noise_samples=20_000.0,
                pools=(replace(A100, member=member(800, fixed_s=0.001)), T4),
            ),
        ),
        expected={"digits": {"a100": 2, "t4-spot": 6}},
    ),
    Scenario(
        name="machines that are gone: it shrinks to what is left and says why",
        pools=(a_pool("a100", 2),),
        jobs=(a_job(pools=(A100, T4), current={"a100": 2, "t4-spot": 3}),),
        expected={"digits": {"a100": 2}},
        words={"digits": "no longer possible"},
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    """Expected grants with their reasons; carried out, nothing changes any more."""
    proposal = propose(PoolCapacity(scenario.pools), scenario.jobs)
    assert {grant.key: dict(grant.workers) for grant in proposal.grants} == scenario.expected
    reasons = {grant.key: grant.reason for grant in proposal.grants}
    for key, words in scenario.words.items():
        assert words in reasons[key]
    assert proposal.exact
    carried_out = tuple(
        replace(job, current=grant.workers) for job, grant in zip(scenario.jobs, proposal.grants, strict=True)
    )
    assert not any(grant.changed for grant in propose(PoolCapacity(scenario.pools), carried_out).grants)
