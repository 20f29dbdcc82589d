"""What the operator keeps of each job: equal sets of field names once, and of a status only what the gauges show."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from heterotrain_operator.api.lean import share_parts
from heterotrain_operator.api.schema import Model
from heterotrain_operator.api.status import HeteroTrainJobStatus, as_body
from lab.scale.workload import Size
from support.load import LoadTest

JOBS = 6


@pytest.fixture
async def load() -> LoadTest:
    """A cluster that jobs have filled."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    filled = LoadTest(Size(jobs=JOBS, pods=10 * JOBS))
    await filled.settle()
    structlog.reset_defaults()
    return filled


def models_in(*roots: Any) -> Iterator[Model]:
    """Yield all models that can be reached; classes, modules and functions are left out."""
    seen: set[int] = set()
    left: list[Any] = list(roots)
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | types.FunctionType | types.MethodType):
            continue
        seen.add(id(each))
        if isinstance(each, Model):
            yield each
        left.extend(gc.get_referents(each))


async def test_equal_sets_of_field_names_are_kept_once(load: LoadTest) -> None:
    jobs = load.app.store.jobs.all().values()
    sets = [model.__pydantic_fields_set__ for model in models_in([(job.spec, job.status) for job in jobs])]
    assert len(sets) > 30 * JOBS
    assert len({id(each) for each in sets}) == len({frozenset(each) for each in sets}) < len(sets) / JOBS
    for job in jobs:
        assert job.status == HeteroTrainJobStatus.model_validate(job.status_body)
        assert as_body(job.status) == as_body(HeteroTrainJobStatus.model_validate(job.status_body))


def test_a_changed_copy_leaves_the_shared_set_as_it_is() -> None:
    one, other = (share_parts(HeteroTrainJobStatus.model_validate({"reason": text})) for text in ("a", "b"))
    assert one.__pydantic_fields_set__ is other.__pydantic_fields_set__
    assert one.model_copy(update={"step": 7}).model_fields_set == {"reason", "step"}
    assert other.model_fields_set == {"reason"}


async def test_the_gauges_of_a_job_keep_no_model(load: LoadTest) -> None:
    gauges = load.app.metrics.job_gauges
    assert len(gauges._jobs) == JOBS
    assert not list(models_in(gauges._jobs))
