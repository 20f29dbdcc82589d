"""Reading a custom resource, with all rules checked again: an object may be older than the rules.

``SpecError`` is the only error of this module: its text is one sentence for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import MAXYEAR, datetime
from typing import Any

from heterotrain_core.contract.choices import Choice
from pydantic import ValidationError

from heterotrain_operator.api.explain import explain
from heterotrain_operator.api.parallelism import problem_with_links
from heterotrain_operator.api.schema import Model, broken_rules
from heterotrain_operator.api.text import quoted
from heterotrain_operator.api.v1alpha1 import MANAGED_BY_US, HeteroTrainJobSpec


class SpecError(ValueError):
    """The spec is invalid; the text says what is wrong and what to do."""


def read_spec(body: Mapping[str, Any]) -> HeteroTrainJobSpec:
    """Return the job's spec.

    Raises:
        SpecError: a field is missing, has a wrong type or contradicts another one.
    """
    try:
        spec = HeteroTrainJobSpec.model_validate(body.get("spec") or {})
    except ValidationError as error:
        raise SpecError(explain(error, HeteroTrainJobSpec, prefix="spec")) from error
    inexact = next(_inexact_choices(spec, body.get("spec"), "spec"), "")
    if problem := inexact or next(broken_rules(spec, "spec"), "") or beyond_rules(spec, body):
        raise SpecError(problem)
    return spec


def _inexact_choices(model: Model, given: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each choice that is not spelled as in the API, which the API server refuses."""
    for name, field in type(model).model_fields.items():
        value, at = getattr(model, name), f"{path}.{field.alias}"
        raw = given.get(field.alias) if isinstance(given, Mapping) else None
        if isinstance(value, Choice) and raw is not None and raw != value.value:
            yield f"{at} is {quoted(str(raw))}, but must be one of {', '.join(type(value))}"
        elif isinstance(value, Model):
            yield from _inexact_choices(value, raw, at)
        elif isinstance(value, tuple) and isinstance(raw, Sequence):
            for index, (item, part) in enumerate(zip(value, raw, strict=False)):
                if isinstance(item, Model):
                    yield from _inexact_choices(item, part, f"{at}[{index}]")


def managed_by_us(spec: HeteroTrainJobSpec) -> bool:
    """Return whether this operator runs the job."""
    return spec.managed_by == MANAGED_BY_US


def most_workers(spec: HeteroTrainJobSpec) -> int:
    """Return the largest number of workers that the job may have."""
    pools = sum(pool.max_replicas for pool in spec.worker_pools)
    return min(pools, spec.elastic_policy.max_replicas or pools)


def least_workers(spec: HeteroTrainJobSpec) -> int:
    """Return how many workers have to have nodes before training starts."""
    return max(spec.elastic_policy.min_replicas, sum(pool.min_replicas for pool in spec.worker_pools))


def beyond_rules(spec: HeteroTrainJobSpec, body: Mapping[str, Any]) -> str:
    """Return what CEL cannot express, or what the API server enforces by the type of a list."""
    names = [pool.name for pool in spec.worker_pools]
    if len(set(names)) != len(names):
        return "spec.workerPools names a pool twice: give every pool its own name"
    if problem := problem_with_links(spec.parallelism.links, names):
        return problem
    if spec.deadline is None:
        return ""
    if spec.deadline.year >= MAXYEAR:
        return f"spec.deadline {spec.deadline.isoformat()} is too far away: give a time before the year {MAXYEAR}"
    created = (body.get("metadata") or {}).get("creationTimestamp")
    if created and spec.deadline <= datetime.fromisoformat(created):
        given = spec.deadline.isoformat()
        return f"spec.deadline {given} had passed when the job was created at {created}: give a later time"
    return ""
