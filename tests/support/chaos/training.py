"""Training as the pods do it: members of the newest plan commit steps together, and a majority survives a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Plan

from support.chaos.api_server import ApiServer, Body

REFRESH_S = 60.0
"""The kubelet refreshes a mounted ConfigMap at least this often, and at once when the pod's annotation changes."""
REGROUP_S = 3.0
"""Seconds that survivors need for a new formation."""


@dataclass(slots=True)
class Process:
    """The training process of one pod.

    Attributes:
        plan: the newest plan that the kubelet has delivered.
        delivered: the pod's annotation and the time of the newest delivery.
        leaves_at_s: when it will have left, because it was asked to; ``None`` if it stays.
    """

    name: str
    uid: str
    plan: Plan | None = None
    delivered: tuple[str, float] = ("", float("-inf"))
    leaves_at_s: float | None = None
    told: bool = False


@dataclass
class JobTraining:
    """The training of one job.

    Attributes:
        total_steps: committed steps at which training is over.
        finished_s: when it was over; infinity before.
        processes: running training processes, by uid.
        shares: samples of one step that each member has processed, by uid; for the metrics.
    """

    server: ApiServer
    namespace: str
    job: str
    job_uid: str
    total_steps: int
    steps: int = 0
    finished_s: float = float("inf")
    processes: dict[str, Process] = field(default_factory=dict)
    formation: tuple[int, frozenset[str]] = (0, frozenset())
    counters: dict[str, dict[int, int]] = field(default_factory=dict)
    ready_at_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether every step is committed."""
        return self.steps >= self.total_steps

    def deliver(self, now_s: float) -> None:
        """Bring the newest plan to the pods, as their kubelets do."""
        body = self.server.objects.get(("configmaps", self.namespace, keys.plan_name(self.job)))
        for process in self.processes.values():
            pod = self.server.objects.get(("pods", self.namespace, process.name))
            if pod is None or pod["metadata"]["uid"] != process.uid:
                continue
            version = pod["metadata"]["annotations"].get(keys.ANNOTATION_PLAN, "")
            if version == process.delivered[0] and now_s - process.delivered[1] < REFRESH_S:
                continue
            process.delivered = version, now_s
            plan = self._plan(body)
            if plan is not None and (process.plan is None or plan.version > process.plan.version):
                process.plan = plan

    def _plan(self, body: Body | None) -> Plan | None:
        text: Any = (body or {}).get("data", {}).get(keys.PLAN_KEY, "")
        found = decode_plan(text, job_uid=self.job_uid)
        return None if isinstance(found, Refused) else found

    def step(self, now_s: float, *, cut_off: frozenset[str]) -> None:
        """Commit a step if the members can, adopt a newer plan if they have it, and let asked workers leave.

        Args:
            now_s: now.
            cut_off: uids of processes that their peers do not reach.
        """
        there = {uid: process for uid, process in self.processes.items() if uid not in cut_off}
        newest = max((p.plan for p in there.values() if p.plan is not None), key=lambda p: p.version, default=None)
        if newest is None:
            return
        for process in there.values():
            plan = process.plan
            if plan is not None and process.name in plan.drain and process.leaves_at_s is None:
                process.leaves_at_s = now_s + 2.0
        named = frozenset(rank.worker_uid for rank in newest.ranks)
        for uid in named & there.keys():  # a rank that has it sends it to all whom it names
            there[uid].plan = newest
        generation, members = self.formation
        if newest.generation > generation and all(
            uid in there and (plan := there[uid].plan) is not None and plan.generation == newest.generation
            for uid in named
        ):
            if named:
                self.formation, self.ready_at_s = (newest.generation, named), now_s + 1.0
            return
        alive = frozenset(uid for uid in members if uid in there)
        if alive != members and len(alive) * 2 > len(members) and len(alive) >= newest.min_replicas:
            self.formation, self.ready_at_s = (generation, alive), now_s + REGROUP_S
            return
        if members and alive == members and now_s >= self.ready_at_s:
            self._commit(newest, members)
            if self.finished:
                self.finished_s = min(self.finished_s, now_s)

    def _commit(self, plan: Plan, members: frozenset[str]) -> None:
        self.steps = min(self.total_steps, self.steps + 1)
        for rank in plan.ranks:
            if rank.worker_uid in members:
                share = plan.members[rank.member].share_samples
                counts = self.counters.setdefault(rank.worker_uid, {})
                counts[share] = counts.get(share, 0) + 1
