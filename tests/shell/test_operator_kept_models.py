"""What the operator keeps of each job: of a status only what the gauges show."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from heterotrain_operator.api.schema import Model
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


async def test_the_gauges_of_a_job_keep_no_model(load: LoadTest) -> None:
    gauges = load.app.metrics.job_gauges
    assert len(gauges._jobs) == JOBS
    assert not list(models_in(gauges._jobs))
