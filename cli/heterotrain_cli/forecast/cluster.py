"""What a running job has learned about its pools: read from its plan, through kubectl and so with the user's own access."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import CommunicationTime, Member, Plan
from heterotrain_core.perf.model import compute_s
from heterotrain_core.split.curve import SplitMember

from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_cli.forecast.job import Job

_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the plan in force holds.

    Attributes:
        plan: the plan itself.
        measured_step_s: the job's measured step time; ``None`` when it has none yet.
    """

    plan: Plan
    measured_step_s: float | None


def learned(job: Job, *, namespace: str | None) -> Learned:
    """Return what the running job of this name has learned.

    Raises:
        UnavailableError: kubectl is missing, or the cluster or the job can't be reached.
        InputError: the job's plan can't be used by this version.
    """
    where = ["--namespace", namespace] if namespace else []
    body = _kubectl("get", f"{keys.PLURAL}.{keys.GROUP}", job.name, *where)
    config = _kubectl("get", "configmap", keys.plan_name(job.name), *where)
    text = (config.get("data") or {}).get(keys.PLAN_KEY)
    if not isinstance(text, str):
        raise UnavailableError(f"the plan of job {job.name} is empty: wait until the operator has written it")
    plan = decode_plan(text, job_uid=str(body["metadata"]["uid"]))
    if isinstance(plan, Refused):
        raise InputError(f"the plan of job {job.name} can't be used: {plan.reason}")
    step_s = (body.get("status") or {}).get("stepSeconds")
    return Learned(plan=plan, measured_step_s=float(step_s) if isinstance(step_s, int | float) else None)


def with_plan(job: Job, plan: Plan) -> Job:
    """Return the job with the speeds that its plan holds: each pool is as fast as its middle rank, the slower of two.

    Raises:
        InputError: the plan holds no learned speed yet.
    """
    if all(member.compute is None for member in plan.members):
        raise InputError(f"job {job.name} has not learned any speed yet: wait for its first epoch, or give a --profile")
    return replace(
        job, pools=tuple(replace(pool, rank=_middle(pool.name, plan.members, job.batch_samples)) for pool in job.pools)
    )


def exchange(plan: Plan) -> CommunicationTime:
    """Return the learned exchange, none while it is unknown."""
    return plan.communication or CommunicationTime()


def _middle(pool: str, members: Sequence[Member], batch_samples: int) -> SplitMember | None:
    typical = max(1, batch_samples // max(1, len(members)))
    known = [
        (compute_s(member.compute, typical), member.rank, member, member.compute)
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


def _kubectl(*arguments: str) -> Mapping[str, Any]:
    """Return the object that kubectl prints as JSON."""
    try:
        done = subprocess.run(
            ["kubectl", *arguments, "--output", "json"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise UnavailableError("kubectl is not installed: install it, or give a --profile") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"the cluster did not answer within {_TIMEOUT_S} s") from error
    if done.returncode != 0:
        # The last line is kubectl's own sentence; those before it are its library's log.
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("Error from server ")
        raise UnavailableError(f"kubectl {' '.join(arguments[:3])} failed: {reason}")
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found
