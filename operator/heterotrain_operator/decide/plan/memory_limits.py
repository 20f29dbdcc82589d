"""Memory that devices of a pool are planned with, after planned parts of the model did not fit there.

What a rank may use is measured before training, and what a part takes is computed. Where both were wrong, the same cut
would run out of memory again. So the pool is planned with less from then on, and the next plan cuts otherwise. That
happens a bounded number of times; then the pool holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from heterotrain_core.contract.outcome import Cause
from heterotrain_core.contract.plan import LayoutKind, Member, Plan, Rank
from heterotrain_planner.layout.pass_time import gathered_bytes
from heterotrain_planner.layout.problem import Problem

from heterotrain_operator.api.internal_status import InternalPool, PoolMemory
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.decide.plan.layout_problem import problem_of
from heterotrain_operator.decide.workers.state import Worker, WorkerState

SHRINK = 0.85
"""Part of the planned bytes with which the pool is planned from then on. Eight times that is 0.27."""
MOST_TRIES = 8
"""Limits that are tried for a pool; the next one is 0."""
MORE_MEMORY = 1.1
"""Where workers report so many times the memory of then, the limit is forgotten: the pool has other devices now."""
OOM_KILLED = "OOMKilled"
"""The kubelet's reason for a container that the kernel ended because of its memory limit."""
_GIB = 1024.0**3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The limits of a job's pools.

    Attributes:
        pools: by name; pools without a limit are left out.
        answers: by uid, a sentence for each worker whose end another cut answers. Such an end is not a failure.
    """

    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The limits and a remedy; empty without any."""
        found = []
        for name, each in sorted(self.pools.items()):
            times = "once" if each.tries == 1 else f"{each.tries} times"
            found.append(f"Pool {name} ran out of memory {times} and {_planned_with(each.limit_bytes)}.")
        return " ".join([*found, "To try the measured memory again, suspend and resume the job."] if found else [])


def limited(profiles: Mapping[str, PoolProfile], pools: Mapping[str, PoolMemory]) -> dict[str, PoolProfile]:
    """Return the profiles with the memory that devices are planned with."""
    return {
        name: replace(profile, memory_bytes=min(profile.memory_bytes, pools[name].limit_bytes))
        if name in pools
        else profile
        for name, profile in profiles.items()
    }


def known_limits(status: HeteroTrainJobStatus, profiles: Mapping[str, PoolProfile]) -> dict[str, PoolMemory]:
    """Return the persisted limits, without those of pools whose workers report more memory than then."""
    found = {}
    for pool in status.internal.pools:
        if pool.memory is None:
            continue
        kept, profile = pool.memory, profiles.get(pool.name)
        if profile is None or profile.memory_bytes <= MORE_MEMORY * kept.usable_bytes:
            found[pool.name] = kept
    return found


def memory_limits(
    spec: HeteroTrainJobSpec | None,
    status: HeteroTrainJobStatus,
    workers: Sequence[Worker],
    plan: Plan | None,
    profiles: Mapping[str, PoolProfile],
) -> MemoryLimits:
    """Return the limits after the ends that the status does not contain yet.

    Args:
        spec: the job's spec; ``None`` if it is not valid.
        status: limits and counted ends so far.
        workers: all workers of the job, judged by the rules of its failure policy.
        plan: the plan in force, which names what each of them held.
        profiles: by pool, as measured.
    """
    if spec is None or not spec.parallelism.is_planned or spec.suspend:
        return MemoryLimits()
    limits, answers = known_limits(status, profiles), {}
    for worker in workers:
        pool = worker.pod.pool
        if not _ran_out(worker) or worker.pod.uid in status.internal.accounted_workers or pool not in profiles:
            continue
        planned = _planned_bytes(spec, plan, worker.pod.uid, profiles)
        if planned is None:  # it was in no plan, or its pool has no profile: a failure as any other
            continue
        before, usable = limits.get(pool), profiles[pool].memory_bytes
        now, tries = math.floor(SHRINK * planned), before.tries if before is not None else 0
        # Workers of one plan may end one after the other. A part that was larger than the limit teaches nothing.
        if before is None or planned <= before.limit_bytes:
            tries += 1
            limits[pool] = PoolMemory(limit_bytes=now if tries <= MOST_TRIES else 0, tries=tries, usable_bytes=usable)
        if worker.action is None:  # else a rule of the job says what its end counts as
            answers[worker.pod.uid] = (
                f"{worker.pod.name} ran out of memory with {_gib(planned)} of training state and activations planned: "
                f"pool {pool} {_planned_with(limits[pool].limit_bytes)} from now on"
            )
    return MemoryLimits(pools=limits, answers=answers)


def with_limits(pool: InternalPool, limits: MemoryLimits) -> InternalPool:
    """Return the persisted values of a pool with its limit."""
    return pool.model_copy(update={"memory": limits.pools.get(pool.name)})


def _ran_out(worker: Worker) -> bool:
    """Return whether a worker ended because memory ran out, unless a rule makes the job fail then."""
    ended = worker.state is WorkerState.FAILED or (worker.state is WorkerState.DISRUPTED and worker.action is not None)
    killed = worker.pod.ended is not None and worker.pod.ended.reason == OOM_KILLED
    return ended and (killed or worker.cause is Cause.OUT_OF_DEVICE_MEMORY)


def _planned_bytes(
    spec: HeteroTrainJobSpec, plan: Plan | None, uid: str, profiles: Mapping[str, PoolProfile]
) -> int | None:
    """Return the most bytes that the plan in force gives a rank of a worker; ``None`` where that is not known."""
    ranks = [rank for rank in plan.ranks if rank.worker_uid == uid] if plan is not None else []
    problem = problem_of(spec, profiles, dict.fromkeys(profiles, 1)) if ranks else ""  # only sizes matter here
    if plan is None or isinstance(problem, str):
        return None
    found = [_stage_bytes(problem, plan, rank) for rank in ranks]
    return max((each for each in found if each is not None), default=None)


def _stage_bytes(problem: Problem, plan: Plan, rank: Rank) -> int | None:
    """Return the planned bytes of a rank's stage: its state, and the activations of the micro-batches that it keeps.

    As the planner counts them (``heterotrain_planner.layout.costs``): the stage that is p-th from the end keeps p
    micro-batches, and no more than its share may have.
    """
    member = plan.members[rank.member]
    if member.layout.state_weights:
        return _shard_bytes(problem, member, rank)
    edges = (0, *member.layout.cuts, len(problem.units))
    if member.layout.kind is LayoutKind.SHARDED or edges[-2] >= edges[-1]:
        return None  # of another mode, or of another model
    own = problem.units[edges[rank.stage] : edges[rank.stage + 1]]
    micro = member.micro_batch_samples or max(1, member.share_samples)
    batches = -(-(member.cap_samples or problem.batch_samples) // micro)
    kept = min(batches, len(edges) - 1 - rank.stage)
    state = sum(unit.parameter_bytes for unit in own) * problem.state_ratio
    if rank.stage not in member.layout.recomputing:
        return math.ceil(state + kept * micro * sum(unit.activation_bytes for unit in own))
    first, last = edges[rank.stage], len(problem.units) - 1
    inner = [unit for unit in range(first, first + len(own)) if 0 < unit < last]
    kept_bytes = sum(problem.units[unit - 1].boundary_bytes for unit in inner)
    kept_bytes += sum(problem.units[unit].activation_bytes for unit in {0, last} & set(range(first, first + len(own))))
    working = max((problem.units[unit].activation_bytes for unit in inner), default=0)
    return math.ceil(state + micro * (kept * kept_bytes + working))


def _shard_bytes(problem: Problem, member: Member, rank: Rank) -> int:
    """Return the planned bytes of a rank's shard: its state, its part of a micro-batch, and what is gathered."""
    layout = member.layout
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    own = layout.state_weights[rank.shard] / sum(layout.state_weights)
    start, stop = layout.sample_part(member.micro_batch_samples or max(1, member.share_samples), rank.shard)
    kept = max(1, stop - start) * sum(unit.activation_bytes for unit in problem.units)
    gathered = gathered_bytes(problem, layout.shards)
    return math.ceil(own * state + kept + gathered)


def _planned_with(limit_bytes: int) -> str:
    return f"is planned with at most {_gib(limit_bytes)} a device" if limit_bytes else "holds nothing of the model"


def _gib(size: float) -> str:
    return f"{size / _GIB:.3g} GiB"
