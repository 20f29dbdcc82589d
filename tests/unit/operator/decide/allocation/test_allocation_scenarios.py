"""Random events on a cluster with several jobs: changes come to an end, and no job loses its minimum to another one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from heterotrain_operator.decide.grant import UNLIMITED
from support.fake_cluster import Body, FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster
from support.repeat import times

POOLS = "abc"


class Scenario:
    """A cluster with random events from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311  # seeded chance
        self.multi = MultiJobCluster(seed)
        self.jobs = self.nodes = 0
        for kind in POOLS:
            for _ in range(self.rng.randint(0, 2)):
                self.add_node(kind)
        self.add_job()

    def add_node(self, kind: str) -> None:
        self.nodes += 1
        self.multi.with_nodes(f"{kind}{self.nodes}", cpu=str(self.rng.randint(1, 4)))

    def add_job(self) -> None:
        rng = self.rng
        self.jobs += 1
        name, frugal = f"j{self.jobs}", rng.random() < 0.2
        pools: list[Body] = []
        for kind in rng.sample(POOLS, rng.randint(1, 3)):
            fields: Body = {
                "maxReplicas": rng.randint(1, 4),
                "resources": {"limits": {"cpu": rng.choice(["500m", "1", "1", "2"])}},
                "capacityType": rng.choice(["Spot", "OnDemand"]),
            }
            if rng.random() < 0.15:
                fields["nodeSelector"] = {}
            if frugal:
                fields["pricePerHour"] = rng.choice(["0.35", "1.0", "3.67"])
            pools.append(pool(kind, **fields))
        least = rng.randint(1, min(3, sum(each["maxReplicas"] for each in pools)))
        objective = {"objective": "Cost"} if frugal else {}
        self.multi.add(name, *pools, elasticPolicy={"minReplicas": least}, backoffLimit=1000, **objective)
        if rng.random() < 0.7:
            self.multi.speeds[name] = {kind: rng.choice([50.0, 100.0, 200.0, 400.0]) for kind in POOLS}

    def anything(self) -> None:
        """Let one random event happen."""
        multi, rng = self.multi, self.rng
        events: list[Callable[[], object]] = [lambda: self.add_node(rng.choice(POOLS)), self.wait, self.restart]
        if len(multi.jobs) < 5:
            events += [self.add_job] * 2
        if len(multi.jobs) > 1:
            events.append(lambda: multi.remove(rng.choice(list(multi.jobs))))
        if multi.nodes:
            events += [lambda: multi.nodes.pop(rng.choice(list(multi.nodes))), self.cordon]
        rng.choice(events)()

    def wait(self) -> None:
        self.multi.now_s += self.rng.choice([30.0, 70.0, 700.0])

    def restart(self) -> None:
        """Replace the operator by a new one without any memory."""
        for cluster in self.multi.jobs.values():
            cluster.grant = UNLIMITED

    def cordon(self) -> None:
        spec = self.multi.nodes[self.rng.choice(list(self.multi.nodes))]["spec"]
        spec["unschedulable"] = not spec.get("unschedulable", False)


def ready(cluster: FakeCluster) -> int:
    return sum(view.ready and not view.deleting for view in cluster.pod_views)


@pytest.mark.parametrize("seed", range(times(gate=5, every=140)))
def test_every_scenario_comes_to_rest_and_no_job_is_stopped_for_another(seed: int) -> None:
    scenario = Scenario(seed)
    for _ in range(8):
        lost = {name: cluster.status.get("disruptions", 0) for name, cluster in scenario.multi.jobs.items()}
        nodes = set(scenario.multi.nodes)
        scenario.anything()
        trained = {name: bool(cluster.members()) for name, cluster in scenario.multi.jobs.items() if cluster.plan}
        scenario.multi.settle(rounds=30)  # asserts that pods and limits stop changing
        for name, cluster in scenario.multi.jobs.items():
            limits = cluster.grant.limits
            if nodes <= set(scenario.multi.nodes):
                assert cluster.status["disruptions"] == lost.get(name, 0), "leaving for another job is not a disruption"
                least = cluster.job_view.spec.elastic_policy.min_replicas if cluster.job_view.spec else 0
                assert not trained.get(name) or ready(cluster) >= least, "no job is stopped for another"
            if limits is not None:
                assert cluster.grant.reason
                assert {p["name"]: p["granted"] for p in cluster.status["pools"]} == limits


@pytest.mark.parametrize("seed", range(times(gate=1, every=40)))
def test_small_differences_of_measured_speeds_move_no_worker(seed: int) -> None:
    """With speeds that vary by half a percent, at most one of many decisions differs."""
    scenario = Scenario(100 + seed)
    for _ in range(3):
        scenario.add_job()
    multi = scenario.multi
    multi.speeds |= {name: dict.fromkeys(POOLS, 100.0) for name in multi.jobs if name not in multi.speeds}
    multi.settle(rounds=30)
    exact = {name: dict(speeds) for name, speeds in multi.speeds.items()}
    moves = 0
    for _ in range(times(gate=6, every=12)):
        for name, speeds in exact.items():
            multi.speeds[name] = {kind: v * (1 + scenario.rng.uniform(-0.005, 0.005)) for kind, v in speeds.items()}
        before = multi.limits()
        multi.settle(rounds=30)
        moves += multi.limits() != before
    assert moves <= 1


def test_the_decision_depends_on_its_inputs_only() -> None:
    scenario = Scenario(7)
    for _ in range(3):
        scenario.add_job()
    first, again = scenario.multi.allocate(), scenario.multi.allocate()
    assert first == again
    for cluster in scenario.multi.jobs.values():
        cluster.grant = replace(cluster.grant, reason="")
    assert {name: each.limits for name, each in scenario.multi.allocate().items()} == {
        name: each.limits for name, each in first.items()
    }
