"""One history: a job, two operators and faults from one seed; and the judgement of its course and its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused as RefusedPlan
from heterotrain_core.contract.codec import decode_plan
from heterotrain_operator.decide.kept_speeds import NAME

from support.chaos.api_server import ApiServer, Body, Write
from support.chaos.connection import Network
from support.chaos.faults import EFFECTS, Fault, draw
from support.chaos.machines import Cluster, Machine, workers_of
from support.chaos.replica import Replica, bugs_of
from support.chaos.telemetry import ChaosPrometheus
from support.chaos.training import JobTraining
from support.chaos.virtual_time import DeadlockError, run_virtual
from support.fake_cluster import NOW_S, job_body, pool

FAULTS_UNTIL_S = 240.0
PATIENCE_S = 3600.0
"""A job that has not ended this long after the last fault has been forgotten."""
QUIET_S = 120.0
QUIET_WRITES = 12
"""Writes in the quiet time after the end, besides renewals of the Lease: a loop would make hundreds."""
FOREIGN_KEY = ("configmaps", "ns", "other-plan")
OPERATORS = ("first", "second")
STARTS_AGAIN = frozenset({"job suspended", "job recreated"})
"""Faults after which some losses do not count."""
HIDES_FAILURES = STARTS_AGAIN | {
    *("node dies", "node name reused", "node reboots", "kubelet away", "spot node taken", "node drained"),
    *("pod deleted", "pod deleted by force"),
}
"""Faults that may remove a failed worker's pod before an operator sees how it ended."""
FINISHING_S = 130.0
"""The operator may see a loss so shortly before the end together with the end, and then it does not count."""


@dataclass
class Verdict:
    """What went wrong in a history, and what happened in it."""

    seed: int
    faults: Sequence[Fault]
    problems: list[str] = field(default_factory=list)
    ended_s: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.faults)} faults, {self.notes}", *(f"  {each}" for each in self.faults)]
        return "\n".join([*lines, *(f"  ✗ {problem}" for problem in self.problems)])


class Scenario:
    """Everything that takes part in a history, as the faults see it."""

    def __init__(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        rng = self.rng = random.Random(f"scenario {seed}")  # noqa: S311  # a seeded scenario, not a secret
        self.server = ApiServer(lambda: NOW_S + loop.time())
        self.network = Network()
        self.cluster = Cluster(self.server, rng, self.server.now_s)
        skews_s = (0.0, -3.0, 600.0, -86_400.0)
        self.prometheus = ChaosPrometheus(
            self.cluster, rng, self.server.now_s, skew_s=rng.choice([0.0, 0.0, -20.0, 20.0])
        )
        self.replicas = [
            Replica(name, self.server, self.network, self.prometheus, rng, skew_s=rng.choice(skews_s))
            for name in OPERATORS
        ]
        self.job_name = "job"
        self.pools = ["a", "b", "c"][: rng.randint(1, 3)]
        self.total_steps = rng.choice([60, 200, 300])
        self.min_replicas = rng.choice([1, 1, 2])
        self.policy = rng.choice(["All", "Running"])
        for name in self.pools:
            for number in range(rng.randint(1, 2)):
                self.cluster.add(f"{name}{number}", name, skew_s=rng.choice([0.0, 0.0, 0.0, 30.0, -600.0, 600.0]))
        self.room = sum(machine.cores for machine in self.cluster.machines.values())
        self.server.put("configmaps", {"metadata": {"name": FOREIGN_KEY[2], "namespace": "ns"}, "data": {"a": "b"}})
        self.create_job()

    def create_job(self) -> None:
        """Create the job as a user does."""
        pools = [pool(name, maxReplicas=2) for name in self.pools]
        least = min(self.min_replicas, self.room)
        spec = {"elasticPolicy": {"minReplicas": least}, "cleanPodPolicy": self.policy}
        body = job_body(*pools, spec=spec)
        for name in ("uid", "resourceVersion", "creationTimestamp", "generation"):
            del body["metadata"][name]
        stored = self.server.put(keys.PLURAL, body, who="user")
        uid = stored["metadata"]["uid"]
        self.cluster.trainings[uid] = JobTraining(self.server, "ns", self.job_name, uid, self.total_steps)

    @property
    def job(self) -> Body:
        """The job as stored."""
        return self.server.objects[keys.PLURAL, "ns", self.job_name]

    @property
    def training(self) -> JobTraining:
        """The training of the present job."""
        return self.cluster.trainings[self.job["metadata"]["uid"]]

    def ended(self) -> bool:
        """Whether the job's status reports its end."""
        return any(
            each["type"] in ("Succeeded", "Failed") and each["status"] == "True"
            for each in (self.job.get("status") or {}).get("conditions", ())
        )

    def later(self, delay_s: float, call: Callable[[], Any]) -> None:
        """Call something after a delay."""
        asyncio.get_running_loop().call_later(delay_s, call)

    def replace(self, machine: Machine, name: str) -> None:
        """Put a new node in the place of a machine, unless another fault already has."""
        if name in self.cluster.machines and self.cluster.machines[name] is not machine:
            return
        self.cluster.reboot(machine)
        self.cluster.remove(machine.name)
        self.cluster.add(name, machine.pool, cores=machine.cores, skew_s=machine.skew_s)


class Judge:
    """Checks each write of the operators."""

    def __init__(self, scenario: Scenario) -> None:
        self.problems: list[str] = []
        self.writes: dict[str, int] = {}
        self.removed: dict[str, float] = {}
        """When an operator deleted a pod, by uid."""
        self._scenario = scenario
        self._versions: dict[str, tuple[int, int]] = {}
        self._members: dict[str, set[str]] = {}

    def observe(self, write: Write) -> None:
        """Check a write."""
        if write.who not in OPERATORS:
            return
        plural, _, name = write.key
        if plural == "pods" and write.before is not None and (write.after is None or _deleting(write.after)):
            self.removed.setdefault(write.before["metadata"]["uid"], self._scenario.server.now_s())
        if plural not in ("leases", "events"):
            self.writes[plural] = self.writes.get(plural, 0) + 1
        if write.key == FOREIGN_KEY:
            self.problems.append("an operator wrote a ConfigMap of others")
        if plural == "configmaps" and write.after is not None:
            self._check_plan(write.after)
        elif plural == keys.PLURAL and write.after is not None and write.before is not None:
            self._check_status(write.before, write.after)
        elif plural == "pods" and write.verb == "create" and write.after is not None:
            self._check_creation(name, write.after)

    def _check_plan(self, body: Body) -> None:
        if body["metadata"]["name"] == NAME:
            return  # speeds for later jobs
        owner = body["metadata"]["ownerReferences"][0]["uid"]
        plan = decode_plan(body["data"].get(keys.PLAN_KEY, ""), job_uid=owner)
        if isinstance(plan, RefusedPlan) or not plan.generation:
            return  # generation 0 names nobody: it is what pods mount after someone has deleted the plan
        before = self._versions.get(owner, (-1, -1))
        if plan.version < before:
            self.problems.append(f"plan {plan.version} was written after plan {before}")
        self._versions[owner] = plan.version
        self._members.setdefault(owner, set()).update(rank.worker_uid for rank in plan.ranks)

    def members(self, uid: str) -> set[str]:
        """Return the uids of all workers that were ever in a plan of a job."""
        return self._members.get(uid, set())

    def _check_status(self, before: Body, after: Body) -> None:
        was, now = _ends(before), _ends(after)
        if was and was != now:
            self.problems.append(f"the job ended with {was}, and later its status reported {now or 'no end'}")
        old, new = before.get("status") or {}, after.get("status") or {}
        for counter in ("restarts", "disruptions"):
            if old.get("conditions") and new.get(counter, 0) < old.get(counter, 0):
                self.problems.append(f"{counter} fell from {old[counter]} to {new.get(counter, 0)}")

    def _check_creation(self, name: str, pod: Body) -> None:
        scenario, owner = self._scenario, pod["metadata"]["ownerReferences"][0]["uid"]
        job = scenario.server.objects.get((keys.PLURAL, "ns", scenario.job_name))
        if job is not None and job["metadata"]["uid"] == owner and _ends(job):
            self.problems.append(f"{name} was created after the job's end")


def _deleting(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _ends(job: Body) -> set[str]:
    conditions = (job.get("status") or {}).get("conditions", ())
    return {each["type"] for each in conditions if each["type"] in ("Succeeded", "Failed") and each["status"] == "True"}


def faults_of(seed: int) -> list[Fault]:
    """Return the faults of a history."""
    rng = random.Random(f"faults {seed}")  # noqa: S311  # a seeded scenario, not a secret
    return draw(rng, until_s=FAULTS_UNTIL_S, most=6)


def play(seed: int, faults: Sequence[Fault] | None = None) -> Verdict:
    """Play a history, with its own faults or with some of them, and judge it."""
    verdict = Verdict(seed, faults_of(seed) if faults is None else faults)
    try:
        run_virtual(_play(verdict))
    except DeadlockError as error:
        verdict.problems.append(str(error))
    return verdict


async def _play(verdict: Verdict) -> None:
    loop = asyncio.get_running_loop()
    scenario = Scenario(verdict.seed)
    judge = Judge(scenario)
    scenario.server.observers.append(judge.observe)
    tasks = [asyncio.create_task(replica.run()) for replica in scenario.replicas]
    for fault in verdict.faults:
        loop.call_at(fault.at_s, _begin, scenario, fault)
    last_s = max((fault.at_s + fault.lasts_s for fault in verdict.faults), default=0.0)
    try:
        while (not scenario.ended() or loop.time() < last_s + 1.0) and loop.time() < last_s + PATIENCE_S:
            scenario.cluster.tick()
            await asyncio.sleep(1.0)
        verdict.ended_s = loop.time()
        await _tick(scenario, 60.0)
        before = dict(judge.writes)
        await _tick(scenario, QUIET_S)
        after = {kind: number - before.get(kind, 0) for kind, number in judge.writes.items()}
        verdict.problems += judge.problems
        verdict.problems += _judge_end(scenario, judge, verdict)
        if sum(after.values()) > QUIET_WRITES:
            verdict.problems.append(f"the operator does not come to rest: {after} writes in {QUIET_S:.0f} s")
        await _judge_removal(scenario, verdict)
    finally:
        for replica in scenario.replicas:
            verdict.problems += replica.unexpected
            verdict.problems += bugs_of(replica.app) if replica.app is not None else []
            replica.link.dead = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _begin(scenario: Scenario, fault: Fault) -> None:
    end = EFFECTS[fault.kind](scenario, fault)
    if end is not None:
        scenario.later(fault.lasts_s, end)


async def _tick(scenario: Scenario, seconds: float) -> None:
    for _ in range(int(seconds)):
        scenario.cluster.tick()
        await asyncio.sleep(1.0)


def _judge_end(scenario: Scenario, judge: Judge, verdict: Verdict) -> list[str]:
    """Return what is wrong with the end of the job."""
    status = scenario.job.get("status") or {}
    conditions = {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions", ())}
    uid, cluster = scenario.job["metadata"]["uid"], scenario.cluster
    own = sum(owner == uid for owner in cluster.own_faults.values())
    finished_s = scenario.training.finished_s - FINISHING_S
    lost = [
        member
        for member in judge.members(uid)
        if cluster.lost.get(member, finished_s) < min(finished_s, judge.removed.get(member, finished_s))
    ]
    verdict.notes = {
        "ended_s": round(verdict.ended_s),
        "restarts": status.get("restarts", 0),
        "disruptions": status.get("disruptions", 0),
        "own faults": own,
        "lost members": len(lost),
        "steps": scenario.training.steps,
        "plan": status.get("plan", {}).get("desired"),
        "ends": {replica.name: dict(replica.ends) for replica in scenario.replicas},
    }
    problems = []
    if conditions.get("Succeeded", ("",))[0] != "True":
        problems.append(f"the job did not succeed: step {scenario.training.steps}, {conditions}")
    if status.get("restarts", 0) > own:
        problems.append(
            f"{status['restarts']} failures were charged, but the job caused {own}: {status.get('lastFailure')}"
        )
    kinds = {fault.kind for fault in verdict.faults}
    if own and not status.get("restarts", 0) and not kinds & HIDES_FAILURES:
        problems.append(f"{own} workers failed by their own fault, but no failure was charged")
    if status.get("disruptions", 0) < len(lost) and not kinds & STARTS_AGAIN:
        problems.append(f"{len(lost)} members were lost, but {status.get('disruptions', 0)} disruptions were counted")
    left = workers_of(scenario.server, scenario.job_name)
    if scenario.policy == "Running":
        left = [pod for pod in left if pod["status"]["phase"] not in ("Succeeded", "Failed")]
    problems += [f"{pod['metadata']['name']} is left over after the end" for pod in left]
    if scenario.server.objects[FOREIGN_KEY]["data"] != {"a": "b"}:
        problems.append("a ConfigMap of others was changed")
    return problems


async def _judge_removal(scenario: Scenario, verdict: Verdict) -> None:
    """Delete the job: nothing may be left, and nothing may come back."""
    scenario.server.drop((keys.PLURAL, "ns", scenario.job_name), who="user")
    await _tick(scenario, 90.0)
    left = [
        key
        for key, body in scenario.server.objects.items()
        if key[0] not in ("nodes", "events", "leases")
        and key[2] not in (FOREIGN_KEY[2], NAME)
        and body["metadata"].get("namespace")
    ]
    verdict.problems += [f"{key[0]} {key[2]} is left over after the deletion of the job" for key in left]
