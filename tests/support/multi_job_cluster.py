"""Several jobs on one cluster in memory: one ``FakeCluster`` per job, with common nodes and a common allocation."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heterotrain_core.contract.codec import decode_plan, encode_plan
from heterotrain_core.contract.plan import ComputeTime, Plan
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.quantity import added
from heterotrain_operator.cluster_state.views import JobKey
from heterotrain_operator.decide.allocation.allocate import decide_allocation
from heterotrain_operator.decide.allocation.competition import AllocationInput, Competition, competitions, takes_part
from heterotrain_operator.decide.grant import JobGrant, persisted_grant
from heterotrain_operator.decide.learn.persisted import persisted_throughput
from heterotrain_operator.decide.learn.throughput import throughput_of
from heterotrain_operator.decide.plan.plan import read_plan
from heterotrain_operator.decide.workers.capacity import AdmittedPod
from heterotrain_operator.engine.allocator import shapes_of

from support.fake_cluster import NOW_S, Body, FakeCluster, node_body


class MultiJobCluster:
    """A cluster with several jobs. ``speeds`` are the samples per second of one worker, by job and pool."""

    def __init__(self, seed: int = 0) -> None:
        self.jobs: dict[str, FakeCluster] = {}
        self.nodes: dict[str, Body] = {}
        self.speeds: dict[str, dict[str, float]] = {}
        self.priorities: dict[str, int] = {}
        """By job, the priority of its pods as admission sets it."""
        self.now_s = NOW_S
        self.keeps_grants = True
        """Whether the allocator still has its last grants; a new operator has only the jobs' status."""
        self._rng = random.Random(seed)  # noqa: S311  # the scheduler's order, not a secret

    def with_nodes(self, *names: str, **fields: Any) -> MultiJobCluster:
        """Add a node of each pool; ``a2`` is a second node of pool ``a``."""
        for name in names:
            self.nodes[name] = node_body(name, name.rstrip("0123456789"), **fields)
        return self

    def add(self, name: str, *pools: Body, **spec: Any) -> FakeCluster:
        """Add a job; later ones are younger."""
        cluster = FakeCluster(*pools, spec=spec)
        cluster.learns = False  # speeds come from `speeds`, not from telemetry
        cluster.job["metadata"] |= {
            "name": name,
            "uid": f"uid-of-{name}",
            "creationTimestamp": rfc3339(NOW_S + len(self.jobs)),
        }
        cluster.nodes = self.nodes
        self.jobs[name] = cluster
        return cluster

    def remove(self, name: str) -> None:
        """Remove a job with all its objects."""
        del self.jobs[name]

    # --- the operator ---

    def competitions(self) -> tuple[Competition, ...]:
        """Return the current competitions."""
        self._share_usage()
        for cluster in self.jobs.values():
            job = cluster.job_view
            known = cluster.model.throughput if self.keeps_grants else persisted_throughput(job.status)
            throughput = throughput_of(known, read_plan(job, cluster.plan_view).plan, cluster.telemetry)
            cluster.model = replace(cluster.model, throughput=throughput)
        inputs = [
            AllocationInput(
                job=cluster.job_view,
                pods=cluster.pod_views,
                plan=cluster.plan_view,
                telemetry=cluster.telemetry,
                throughput=cluster.model.throughput,
                shapes=shapes_of(cluster.job_view),
                admitted={
                    name: AdmittedPod(shape=shape, priority=self.priorities.get(cluster.job_view.key.name, 0))
                    for name, shape in shapes_of(cluster.job_view).items()
                },
            )
            for cluster in self.jobs.values()
            if takes_part(cluster.job_view)
        ]
        some = next(iter(self.jobs.values()))
        jobs = {name: cluster.job_view for name, cluster in self.jobs.items()}
        before = {
            jobs[name].key: cluster.grant if self.keeps_grants else persisted_grant(jobs[name].status)
            for name, cluster in self.jobs.items()
        }
        return competitions(inputs, some.node_views, some.observe().used(), before.__getitem__)

    def allocate(self) -> dict[str, JobGrant]:
        """Decide about all jobs, and return their grants."""
        answer: dict[JobKey, JobGrant] = {}
        for competition in self.competitions():
            answer |= decide_allocation(competition, now_s=self.now_s)
        return {key.name: grant for key, grant in answer.items()}

    def step(self) -> None:
        """Allocate, let each job's pass act, and let the cluster follow."""
        for name, grant in self.allocate().items():
            self.jobs[name].grant = grant
        for cluster in self.jobs.values():
            cluster.now_s = self.now_s
            self._share_usage()
            cluster.settle()
        for name, cluster in self.jobs.items():
            self._learn(name, cluster)
        for cluster in self.jobs.values():
            for pod in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
                cluster.vanish(pod)
        for cluster in self._rng.sample(list(self.jobs.values()), len(self.jobs)):
            self._share_usage()
            cluster.schedule().run()

    def settle(self, *, rounds: int = 25) -> MultiJobCluster:
        """Step until pods and limits stay the same; fail after too many rounds."""
        for _ in range(rounds):
            before = self.pods(), self.limits()
            self.step()
            self.now_s += 3.0
            if (self.pods(), self.limits()) == before:
                return self
        raise AssertionError(f"limits or pods still change after {rounds} rounds: {self.limits()}, {self.placed()}")

    # --- state ---

    def placed(self) -> dict[str, dict[str, int]]:
        """Return by job and pool how many workers have nodes."""
        found: dict[str, dict[str, int]] = {}
        for name, cluster in self.jobs.items():
            counts: dict[str, int] = {}
            for view in cluster.pod_views:
                if view.node and not view.deleting and not view.terminal:
                    counts[view.pool] = counts.get(view.pool, 0) + 1
            found[name] = counts
        return found

    def pods(self) -> dict[str, dict[str, str]]:
        """Return by job its pods with their nodes; the node is empty while a pod waits."""
        return {name: {view.name: view.node for view in cluster.pod_views} for name, cluster in self.jobs.items()}

    def placed_pods(self, name: str) -> list[str]:
        """Return the pods of a job that have nodes."""
        return [view.name for view in self.jobs[name].pod_views if view.node]

    def limits(self) -> dict[str, Mapping[str, int] | None]:
        """Return by job its limits by pool; ``None`` without limits."""
        return {name: cluster.grant.limits for name, cluster in self.jobs.items()}

    def waiting(self, name: str) -> int:
        """Return how many workers of a job have no node."""
        return sum(not view.node for view in self.jobs[name].pod_views)

    def _share_usage(self) -> None:
        usage: dict[str, dict[str, dict[str, float]]] = {}
        for name, cluster in self.jobs.items():
            own: dict[str, dict[str, float]] = {}
            for view in cluster.pod_views:
                if view.node and not view.phase_ended:
                    own[view.node] = added([own.get(view.node, {}), view.requests])
            usage[name] = own
        for name, cluster in self.jobs.items():
            others = [own for other, own in usage.items() if other != name]
            cluster.foreign = {
                node: added([own.get(node, {}) for own in others]) for node in {node for own in others for node in own}
            }

    def _learn(self, name: str, cluster: FakeCluster) -> None:
        """Write the members' speeds into the plan, as if the job had trained for a while."""
        if name not in self.speeds or cluster.plan is None:
            return
        plan = decode_plan(cluster.plan["data"]["plan.json"], job_uid=cluster.job["metadata"]["uid"])
        assert isinstance(plan, Plan)
        members = tuple(replace(member, compute=even_time(self.speeds[name][member.pool])) for member in plan.members)
        cluster.plan = copy.deepcopy(cluster.plan)
        cluster.plan["data"]["plan.json"] = encode_plan(replace(plan, members=members))


def even_time(samples_per_s: float) -> ComputeTime:
    """Return the time model of a worker without a fixed part: its speed is the same at every share."""
    third = 1.0 / samples_per_s / 3.0
    return ComputeTime(per_sample_s=third, fixed_s=0.0, backward_per_sample_s=2 * third, backward_fixed_s=0.0)
