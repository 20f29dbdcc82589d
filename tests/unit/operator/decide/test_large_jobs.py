"""A decision about a large job, counted: calls grow with the number of workers, not with its square."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.decide.job import decide
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.queries import series_and_times_of
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import Vector, parse_answer
from lab.scale.exporters import SCRAPE_S, StandIn
from support.fake_cluster import FakeCluster, node_body, pool

FEW, MANY = 50, 200
MOST_GROWTH = 1.1 * MANY / FEW
POOLS = ("a100", "v100")
MOST_CALLS_PER_WORKER = 250
"""Of Python and of C, while no member changes."""
CHANGED = 10
"""One of so many workers is concerned by a change."""


def large_job(workers: int) -> FakeCluster:
    """Return a job with this many training workers of two pools, and telemetry of three scrapes."""
    pools = [pool(name, maxReplicas=workers // 2) for name in POOLS]
    cluster = FakeCluster(*pools, spec={"training": {"globalBatchSize": 64 * workers}})
    for name in POOLS:
        cluster.nodes[name] = node_body(name, name, cpu=str(workers))
        cluster.nodes[name]["status"]["allocatable"]["pods"] = str(workers)
    cluster.settle()
    for body in cluster.pods.values():
        body["spec"]["nodeName"] = body["spec"]["nodeSelector"]["pool"]
    cluster.run().settle()
    stand_in, history = StandIn(lambda: cluster.now_s), TelemetryHistory()
    pools_by_uid = {pod.uid: pod.pool for pod in cluster.pod_views}

    def answer(query: str) -> Vector:
        return parse_answer(json.dumps(stand_in.answer(query)).encode())

    assert cluster.plan is not None
    stand_in.take(cluster.plan["data"][keys.PLAN_KEY])
    uid = cluster.job["metadata"]["uid"]
    for _ in range(3):
        cluster.pass_time(SCRAPE_S)
        found = parse_everything(answer(series_and_times_of(uid)))
        history.take(found, found.times, pools=pools_by_uid)
    cluster.telemetry = history.telemetry
    return cluster


def no_news(_: FakeCluster) -> None:
    pass


def a_new_revision(cluster: FakeCluster) -> None:
    assert cluster.plan is not None
    plan = json.loads(cluster.plan["data"][keys.PLAN_KEY])
    plan["revision"] += 1
    cluster.plan["data"][keys.PLAN_KEY] = json.dumps(plan)


def failed_workers(cluster: FakeCluster) -> None:
    for name in list(cluster.pods)[::CHANGED]:
        cluster.end(name, exit_code=1)


def leaving_workers(cluster: FakeCluster) -> None:
    for body in list(cluster.pods.values())[::CHANGED]:
        body["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:20Z"


def spare_workers(cluster: FakeCluster) -> None:
    """Let the plan leave workers out as spares."""
    assert cluster.plan is not None
    plan = json.loads(cluster.plan["data"][keys.PLAN_KEY])
    kept = len(plan["members"]) - len(plan["members"]) // CHANGED
    plan["spares"] = [rank["worker"] for rank in plan["ranks"][kept:]]
    plan["members"], plan["ranks"] = plan["members"][:kept], plan["ranks"][:kept]
    plan["global_batch_samples"] = sum(member["share_samples"] for member in plan["members"])
    cluster.plan["data"][keys.PLAN_KEY] = json.dumps(plan)


def calls_of_a_decision(inputs: JobInputs) -> int:
    """Return how many functions one decision calls, without the first one, which decodes the plan."""
    calls = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    decide(inputs)
    sys.setprofile(profile)
    try:
        decide(inputs)
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def large_jobs() -> dict[int, FakeCluster]:
    """Return a job with few and one with many workers."""
    return {workers: large_job(workers) for workers in (FEW, MANY)}


def copied(cluster: FakeCluster) -> FakeCluster:
    """Return a cluster of which a test may change what it likes."""
    found = copy.copy(cluster)
    found.job, found.pods, found.plan = copy.deepcopy((cluster.job, cluster.pods, cluster.plan))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("change", [no_news, a_new_revision, failed_workers, leaving_workers, spare_workers])
def test_four_times_as_many_workers_cost_four_times_as_many_calls(
    change: Callable[[FakeCluster], None], large_jobs: dict[int, FakeCluster]
) -> None:
    counts: dict[int, int] = {}
    for workers, job in large_jobs.items():
        cluster = copied(job)
        change(cluster)
        cluster.learns = False
        counts[workers] = calls_of_a_decision(cluster.observe())
        assert counts[workers] > 10 * workers, "calls are counted"
    assert counts[MANY] <= MOST_GROWTH * counts[FEW]


@pytest.mark.parametrize("change", [no_news, a_new_revision])
def test_a_decision_looks_at_each_worker_a_few_times(
    change: Callable[[FakeCluster], None], large_jobs: dict[int, FakeCluster]
) -> None:
    """Otherwise each condition, row and event counts all workers again."""
    cluster = copied(large_jobs[FEW])
    change(cluster)
    cluster.learns = False
    calls = calls_of_a_decision(cluster.observe())
    assert calls <= MOST_CALLS_PER_WORKER * FEW
