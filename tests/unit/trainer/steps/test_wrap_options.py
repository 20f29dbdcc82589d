"""Options of ``job.wrap`` that have no effect in a layout."""

from __future__ import annotations

import logging

import heterotrain
import pytest
import torch
from heterotrain.errors import UsageError


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


@pytest.mark.parametrize("parallelism", ["data", "sharded", "pipeline"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ""),
        ({"checkpoint_units": True}, ""),
        ({"keep_gathered": True}, "job.wrap: keep_gathered=True has no effect"),
        ({"offload": True, "keep_gathered": True}, "job.wrap: keep_gathered=True and offload=True have no effect"),
    ],
)
def test_options_for_divided_tensors_are_a_warning_where_no_tensor_is_divided(
    caplog: pytest.LogCaptureFixture, parallelism: str, options: dict[str, bool], told: str
) -> None:
    """The same script trains in every layout, so they are no error; a member of one rank divides nothing, too."""
    caplog.set_level(logging.WARNING)
    job = heterotrain.init(epochs=1, batch_samples=4, parallelism=parallelism)
    if parallelism == "pipeline":
        options = {name: value for name, value in options.items() if name != "offload"}
        told = told.replace(" and offload=True have", " has")
    job.wrap(layers, **options)
    found = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert len(found) == bool(told)
    where = "this model is cut into stages" if parallelism == "pipeline" else "this rank holds the whole model"
    assert all(each.startswith(told) and where in each for each in found)
    assert all(("stays in the device's memory" in each) is ("offload" in told) for each in found)


def test_stages_refuse_to_be_offloaded_before_anything_is_planned() -> None:
    """They would take the device's memory, and a log line does not keep a job from running out of it."""
    job = heterotrain.init(epochs=1, batch_samples=4, parallelism="pipeline")
    with pytest.raises(UsageError, match="offload=True is not possible for stages"):
        job.wrap(layers, offload=True)
    job.wrap(layers)
