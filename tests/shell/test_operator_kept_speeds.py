"""Whole jobs of a whole operator in virtual time, one after the other: what one has learned starts the next."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import ComputeTime, Plan
from heterotrain_core.split.balance import Split, balance, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_operator.decide.kept_speeds import NAME
from support.chaos.api_server import ApiServer, Write
from support.chaos.connection import Network
from support.chaos.machines import Cluster
from support.chaos.replica import Replica, bugs_of
from support.chaos.telemetry import ChaosPrometheus
from support.chaos.training import JobTraining
from support.chaos.virtual_time import run_virtual
from support.fake_cluster import NOW_S, Body, job_body, pool

SLOWNESS = {"a": 1.0, "b": 3.0, "c": 1.5}
SHORT, STEPS = 70, 150
LIMIT_S = 1200.0


class World:
    """A cluster with an operator; jobs run one after the other."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        rng = random.Random(7)  # noqa: S311  # a seeded scenario, not a secret
        self.server = ApiServer(lambda: NOW_S + loop.time())
        self.cluster = Cluster(self.server, rng, self.server.now_s)
        prometheus = ChaosPrometheus(self.cluster, rng, self.server.now_s, skew_s=0.0)
        prometheus.slowness = SLOWNESS
        self.operator = Replica("first", self.server, Network(), prometheus, rng, skew_s=0.0)
        self.plans: dict[str, list[Plan]] = {}
        self.server.observers.append(self._note)
        for name in SLOWNESS:
            self.cluster.add(f"{name}0", name)

    def _note(self, write: Write) -> None:
        """Keep each plan with members, by job."""
        if write.key[0] != "configmaps" or write.after is None or write.key[2] == NAME:
            return
        owner = write.after["metadata"]["ownerReferences"][0]
        plan = decode_plan(write.after["data"].get(keys.PLAN_KEY, ""), job_uid=owner["uid"])
        if not isinstance(plan, Refused) and plan.members:
            self.plans.setdefault(owner["name"], []).append(plan)

    async def train(self, name: str, *, namespace: str = "ns", steps: int = STEPS, spec: Body | None = None) -> Plan:
        """Run a job to its end; return its first plan."""
        given = {"elasticPolicy": {"minReplicas": len(SLOWNESS)}, **(spec or {})}
        body = job_body(*map(pool, SLOWNESS), spec=given, name=name, namespace=namespace)
        for field in ("uid", "resourceVersion", "creationTimestamp", "generation"):
            del body["metadata"][field]
        uid = self.server.put(keys.PLURAL, body, who="user")["metadata"]["uid"]
        self.cluster.trainings[uid] = JobTraining(self.server, namespace, name, uid, steps)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LIMIT_S
        while "completionTime" not in (self.job(name, namespace).get("status") or {}):
            assert loop.time() < until_s, "the job does not end"
            await self.wait(1)
        await self.wait(20)
        return self.plans[name][0]

    def job(self, name: str, namespace: str = "ns") -> Body:
        return self.server.objects[keys.PLURAL, namespace, name]

    async def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.cluster.tick()
            await asyncio.sleep(1.0)

    def speeds(self) -> Body:
        return self.server.objects["configmaps", "ns", NAME]

    def edit(self, change: Callable[[str, str], str]) -> None:
        """Edit each entry of the ConfigMap, as a user may."""
        body = self.server.find("configmaps", "ns", NAME)
        assert body is not None
        body["data"] = {key: change(key, text) for key, text in body["data"].items()}
        self.server.put("configmaps", body, who="user")


def run(story: Callable[[World], Any]) -> None:
    async def play() -> None:
        world = World()
        operator = asyncio.create_task(world.operator.run())
        try:
            await story(world)
            assert world.operator.unexpected == []
            assert world.operator.app is not None
            assert bugs_of(world.operator.app) == []
        finally:
            world.operator.link.dead = True
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)

    run_virtual(play())


def loss(plan: Plan) -> float:
    """Return how much longer than with the best shares a step is, by the members' true speeds."""
    members = []
    for member in plan.members:
        slow = SLOWNESS[member.pool]
        compute = ComputeTime(
            per_sample_s=0.002 * slow,
            fixed_s=0.0,
            backward_per_sample_s=0.004 * slow,
            backward_fixed_s=0.0,
            update_s=0.01,
        )
        members.append(SplitMember(compute=compute))
    mine, best = evaluate(plan.shares, members), balance(plan.global_batch_samples, members)
    assert isinstance(mine, Split)
    assert isinstance(best, Split)
    return mine.step_s / best.step_s - 1


def even(plan: Plan) -> bool:
    return max(plan.shares) - min(plan.shares) <= 1


def test_the_second_job_starts_with_what_the_first_has_learned_and_probes_nothing() -> None:
    async def story(world: World) -> None:
        epochs = {"training": {"rebalance": {"boundary": "Steps", "everySteps": 20}}}
        first = await world.train("first", spec=epochs)
        assert even(first)
        assert first.probe
        assert sorted(key.split(".")[0] for key in world.speeds()["data"]) == sorted(SLOWNESS)
        second = await world.train("second", spec=epochs)
        assert loss(second) <= 0.02
        assert not second.probe
        assert "speeds are those of job first" in second.reason
        assert all(loss(plan) <= 0.02 and not plan.probe for plan in world.plans["second"])
        assert {json.loads(text)["job"] for text in world.speeds()["data"].values()} == {"second"}

    run(story)


def test_another_namespace_image_or_command_starts_without() -> None:
    async def story(world: World) -> None:
        await world.train("first", steps=SHORT)
        assert even(await world.train("elsewhere", namespace="others", steps=SHORT))
        main: Body = {"name": "main", "image": "image", "command": ["train"]}
        changes: tuple[Body, ...] = ({"image": "other"}, {"command": ["train", "--large"]})
        for number, change in enumerate(changes):
            template = {"spec": {"containers": [{**main, **change}]}}
            assert even(await world.train(f"other{number}", steps=SHORT, spec={"template": template}))
        assert loss(await world.train("same", steps=SHORT)) <= 0.02
        world.server.drop(("configmaps", "ns", NAME), who="user")
        assert even(await world.train("forgotten", steps=SHORT)), "deleting the ConfigMap forgets"

    run(story)


@pytest.mark.parametrize("lie", [0.1, 6.0])
def test_a_speed_that_lies_is_corrected_within_some_scrapes(lie: float) -> None:
    async def story(world: World) -> None:
        await world.train("first", steps=SHORT)

        def changed(key: str, text: str) -> str:
            entry = json.loads(text)
            factor = lie if key.startswith("b.") else 1.0
            return json.dumps({k: v * factor if k.endswith("Seconds") else v for k, v in entry.items()})

        world.edit(changed)
        assert loss(await world.train("deceived")) > 0.2
        assert loss(world.plans["deceived"][-1]) <= 0.02
        assert loss(await world.train("next", steps=SHORT)) <= 0.02, "and the next job finds the truth"

    run(story)


@pytest.mark.parametrize("text", ['{"version": 1}', "9" * 10_000])
def test_a_config_map_that_makes_no_sense_costs_a_job_nothing_but_an_event(text: str) -> None:
    async def story(world: World) -> None:
        await world.train("first", steps=SHORT)
        world.edit(lambda *_: text)
        assert even(await world.train("second", steps=SHORT))
        events = [body for (kind, _, _), body in world.server.objects.items() if kind == "events"]
        found = [each["message"] for each in events if each["reason"] == "SpeedsIgnored"]
        assert len(found) == 1
        assert found[0].startswith(f"ConfigMap {NAME}: entries without sense are ignored, such as ")
        assert loss(await world.train("third", steps=SHORT)) <= 0.02

    run(story)
