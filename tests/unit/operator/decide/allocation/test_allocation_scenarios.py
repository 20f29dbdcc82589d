"""Whatever happens to a cluster with several jobs: it comes to rest, nobody is robbed of his minimum or charged, and stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from heterotrain_operator.decide.grants.grant import UNLIMITED
from support.fake_cluster import Body, FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster

POOLS = "abc"
STORIES = 14


class Scenario:
    """A cluster to which things happen by seeded chance."""

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
        """Let one thing happen."""
        multi, rng = self.multi, self.rng
        things: list[Callable[[], object]] = [lambda: self.add_node(rng.choice(POOLS)), self.wait, self.restart]
        if len(multi.jobs) < 5:
            things += [self.add_job] * 2
        if len(multi.jobs) > 1:
            things.append(lambda: multi.remove(rng.choice(list(multi.jobs))))
        if multi.nodes:
            things += [lambda: multi.nodes.pop(rng.choice(list(multi.nodes))), self.cordon]
        rng.choice(things)()

    def wait(self) -> None:
        self.multi.now_s += self.rng.choice([30.0, 70.0, 700.0])

    def restart(self) -> None:
        """Let another operator go on, who knows only the cluster."""
        for cluster in self.multi.jobs.values():
            cluster.grant = UNLIMITED

    def cordon(self) -> None:
        spec = self.multi.nodes[self.rng.choice(list(self.multi.nodes))]["spec"]
        spec["unschedulable"] = not spec.get("unschedulable", False)


def ready(cluster: FakeCluster) -> int:
    return sum(view.ready and not view.deleting for view in cluster.pod_views)


@pytest.mark.parametrize("seed", range(STORIES))
def test_every_scenario_comes_to_rest_and_nobody_pays_for_another(seed: int) -> None:
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
                assert cluster.status["disruptions"] == lost.get(name, 0), "leaving for another job is no disruption"
                least = cluster.job_view.spec.elastic_policy.min_replicas if cluster.job_view.spec else 0
                assert not trained.get(name) or ready(cluster) >= least, "nobody is stopped for another"
            if limits is not None:
                assert cluster.grant.reason
                assert {p["name"]: p["granted"] for p in cluster.status["pools"]} == limits


@pytest.mark.parametrize("seed", range(4))
def test_speeds_that_are_measured_a_little_differently_move_nobody(seed: int) -> None:
    """Decided again and again with speeds that differ by half a percent: nobody moves more than once."""
    scenario = Scenario(100 + seed)
    for _ in range(3):
        scenario.add_job()
    multi = scenario.multi
    multi.speeds |= {name: dict.fromkeys(POOLS, 100.0) for name in multi.jobs if name not in multi.speeds}
    multi.settle(rounds=30)
    exact = {name: dict(speeds) for name, speeds in multi.speeds.items()}
    moves = 0
    for _ in range(12):
        for name, speeds in exact.items():
            multi.speeds[name] = {kind: v * (1 + scenario.rng.uniform(-0.005, 0.005)) for kind, v in speeds.items()}
        before = multi.limits()
        multi.settle(rounds=30)
        moves += multi.limits() != before
    assert moves <= 1


def test_deciding_is_a_function_of_what_is_seen() -> None:
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
