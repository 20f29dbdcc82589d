"""The measured speeds of a running job, read from its plan with the user's own access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.hiccups import NO_HICCUPS
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime, Member, Plan
from heterotrain_core.split.member import SplitMember
from heterotrain_operator.api.internal_status import InternalStatus
from heterotrain_operator.api.tolerant import read_tolerantly
from heterotrain_operator.decide.learn.persisted import compute_time, measured_exchange
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from heterotrain_planner.perf.expected_maximum import common_variation
from heterotrain_planner.perf.model import compute_s

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_cli.forecast.job import JobInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """The plan and the measurements of a running job.

    Attributes:
        body: the job's object.
        plan: the plan in force.
        speeds: time models in the job's status, by pool; for pools without workers.
        measured_step_s: the job's measured step time; ``None`` before the first measurement.
        exchange: the exchange in the job's status, with all numbers of members that it was measured with.
    """

    body: Mapping[str, Any]
    plan: Plan
    speeds: Mapping[str, ComputeTime]
    measured_step_s: float | None
    exchange: MeasuredExchange = field(default_factory=MeasuredExchange)


def read_running_job(name: str, *, target: Target) -> RunningJob:
    """Return the running job of a name.

    Raises:
        UnavailableError: the cluster does not answer, or the job has no plan yet.
        InputError: there is no such job, or this version cannot use its plan.
    """
    cluster = Cluster(target)
    return running_job(cluster, name, cluster.job(name))


def running_job(cluster: Cluster, name: str, body: Mapping[str, Any]) -> RunningJob:
    """Return the plan and the measurements of a job, whose object was read from the cluster.

    Raises:
        UnavailableError: the cluster does not answer, or the job has no plan yet.
        InputError: this version cannot use its plan.
    """
    config = cluster.config_map(keys.plan_name(name))
    text = (config.get("data") or {}).get(keys.PLAN_KEY)
    if not isinstance(text, str):
        raise UnavailableError(f"the plan of job {name} is empty: wait until the operator has written it")
    plan = decode_plan(text, job_uid=str(body["metadata"]["uid"]))
    if isinstance(plan, Refused):
        raise InputError(f"the plan of job {name} cannot be used: {plan.reason}")
    status = body.get("status") or {}
    step_s = status.get("stepSeconds")
    internal = read_tolerantly(InternalStatus, status.get("internal"))
    return RunningJob(
        body=body,
        plan=plan,
        speeds={pool.name: compute_time(pool.speed) for pool in internal.pools if pool.speed is not None},
        exchange=measured_exchange(internal.exchange),
        measured_step_s=float(step_s) if isinstance(step_s, int | float) else None,
    )


def with_measured_speeds(job: JobInput, found: RunningJob) -> JobInput:
    """Return the job with measured speeds: each pool has the speed of its median rank in the plan, the slower of two.

    A pool without workers has the speed of its last ones. All ranks have the variation that explains the plan's ceiling
    of efficiency, as in the operator's allocation.

    Raises:
        InputError: no pool has a measured speed yet.
    """
    plan = found.plan
    variation = _variation(plan)
    pools = []
    for pool in job.pools:
        rank = _median_rank(pool.name, plan.members, job.batch_samples)
        if rank is None and pool.name in found.speeds:
            rank = SplitMember(compute=found.speeds[pool.name])
        pools.append(replace(pool, rank=rank, variation=variation))
    if all(pool.rank is None for pool in pools):
        raise InputError(f"job {job.name} has not learned any speed yet: wait for its first epoch, or use --profile")
    return replace(job, pools=tuple(pools), hiccups=plan.prediction.hiccups if plan.prediction else NO_HICCUPS)


def exchange(found: RunningJob) -> MeasuredExchange:
    """Return the exchange among the plan's members, with the other numbers of members that the job has had.

    It is empty while it is unknown.
    """
    plan = found.plan
    return MeasuredExchange(
        communication=plan.communication or CommunicationTime(),
        members=len(plan.members),
        seen=found.exchange.seen if plan.communication is not None else (),
    )


def _variation(plan: Plan) -> float | None:
    """Return the common variation of the plan's members; ``None`` while it is unknown, or for a single member."""
    if plan.prediction is None or len(plan.members) < 2:  # noqa: PLR2004  # one member waits for no other
        return None
    # Members that vary by more than their mean are a measurement of something else.
    relative = plan.prediction.hiccups.relative_to(plan.prediction.own_s)
    return min(1.0, common_variation(plan.prediction.efficiency_ceiling, len(plan.members), relative))


def _median_rank(pool: str, members: Sequence[Member], batch_samples: int) -> SplitMember | None:
    typical = max(1, batch_samples // max(1, len(members)))
    known = [
        (compute_s(member.compute, typical), member.index, member, member.compute)
        for member in members
        if member.pool == pool and member.compute is not None
    ]
    if not known:
        return None
    _, _, member, compute = sorted(known, key=lambda item: item[:2])[len(known) // 2]
    return SplitMember(
        compute=compute,
        cap_samples=member.cap_samples,
        micro_cap_samples=member.micro_batch_samples or None,
    )
