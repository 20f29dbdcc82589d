"""Reading a custom resource: what the API server let through is checked again, because rules can be older than objects.

``SpecError`` is the only error of this module: its text is one sentence for the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import MAXYEAR, datetime
from typing import Any

from heterotrain_core.allocate.problem import Objective
from heterotrain_core.contract.plan import BoundaryKind
from pydantic import ValidationError

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import MANAGED_BY_US, HeteroTrainJobSpec


class SpecError(ValueError):
    """The job can't be run as it is written; the text says what is wrong and what to do."""


def read_spec(body: Mapping[str, Any]) -> HeteroTrainJobSpec:
    """Return the job's spec.

    Raises:
        SpecError: a field is missing, has a wrong type or contradicts another one.
    """
    try:
        spec = HeteroTrainJobSpec.model_validate(body.get("spec") or {})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"spec.{path}: {first['msg']}") from error
    if problem := _contradiction(spec) or _over_at_creation(spec, body):
        raise SpecError(problem)
    return spec


def read_status(body: Mapping[str, Any]) -> HeteroTrainJobStatus:
    """Return the job's status; one that can't be read (written by another version) counts as empty."""
    try:
        return HeteroTrainJobStatus.model_validate(body.get("status") or {})
    except ValidationError:
        return HeteroTrainJobStatus()


def managed_by_us(spec: HeteroTrainJobSpec) -> bool:
    """Tell whether this operator runs the job."""
    return spec.managed_by == MANAGED_BY_US


def most_workers(spec: HeteroTrainJobSpec) -> int:
    """Return the largest number of workers that the job may have."""
    pools = sum(pool.max_replicas for pool in spec.worker_pools)
    return min(pools, spec.elastic_policy.max_replicas or pools)


def _contradiction(spec: HeteroTrainJobSpec) -> str:
    policy, pools = spec.elastic_policy, spec.worker_pools
    most = most_workers(spec)
    names = [pool.name for pool in pools]
    if len(set(names)) != len(names):
        return "spec.workerPools names a pool twice: give every pool its own name"
    if policy.min_replicas > most:
        return (
            f"spec.elasticPolicy.minReplicas is {policy.min_replicas}, but at most {most} workers are allowed: lower it"
        )
    for pool in pools:
        if pool.min_replicas > pool.max_replicas:
            return (
                f"pool {pool.name} has minReplicas {pool.min_replicas} above maxReplicas {pool.max_replicas}: lower it"
            )
    if (needed := sum(pool.min_replicas for pool in pools)) > most:
        return f"the pools' minReplicas add up to {needed}, but at most {most} workers are allowed: lower them"
    adaptive = spec.training.adaptive_batch
    if (spec.training.global_batch_size is None) == (adaptive is None):
        return "spec.training has to give exactly one of globalBatchSize and adaptiveBatch: set one, remove the other"
    if adaptive is not None and adaptive.least_samples > adaptive.most_samples:
        return f"spec.training.adaptiveBatch.min {adaptive.least_samples} is above its max {adaptive.most_samples}: lower it"
    if (batch := spec.training.base_batch_samples) < most:
        field = "globalBatchSize" if adaptive is None else "adaptiveBatch.min"
        return (
            f"spec.training.{field} is {batch}, fewer than the {most} workers that the job may have: raise it or lower "
            "maxReplicas"
        )
    if problem := _contradicting_objective(spec):
        return problem
    rebalance = spec.training.rebalance
    if (rebalance.boundary is BoundaryKind.STEPS) != (rebalance.every_steps > 0):
        return "spec.training.rebalance.everySteps belongs to boundary: Steps and has to be at least 1 there"
    return ""


def _contradicting_objective(spec: HeteroTrainJobSpec) -> str:
    pools = spec.worker_pools
    if spec.deadline is not None and spec.deadline.year >= MAXYEAR:
        return f"spec.deadline {spec.deadline.isoformat()} is no time that can be counted with: give one before the year {MAXYEAR}"
    if spec.objective is Objective.COST and (unpriced := [p.name for p in pools if p.price_per_hour is None]):
        return f"spec.objective Cost compares prices, but pool {unpriced[0]} has no pricePerHour: give every pool its price"
    if (spec.objective is Objective.DEADLINE) != (spec.deadline is not None):
        return "spec.deadline belongs to objective: Deadline and is required there: give both or neither"
    if spec.objective is Objective.DEADLINE and len({pool.price_per_hour is None for pool in pools}) > 1:
        return "spec.objective Deadline compares prices: give every pool its pricePerHour, or none of them"
    return ""


def _over_at_creation(spec: HeteroTrainJobSpec, body: Mapping[str, Any]) -> str:
    created = (body.get("metadata") or {}).get("creationTimestamp")
    if spec.deadline is None or not created or spec.deadline > datetime.fromisoformat(created):
        return ""
    return (
        f"spec.deadline {spec.deadline.isoformat()} was over when the job was created at {created}: give it a later one"
    )
