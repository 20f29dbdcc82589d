"""A step whose micro-batches all have weight zero trains nothing, and says so."""

from __future__ import annotations

import pytest
from support.one_process import DATA, a_job, squared_error


def test_steps_without_weight_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    job, model, optimizer = a_job()
    before = model.weight.detach().clone()
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y), weight=0)
            step.apply(optimizer)
    assert model.weight.equal(before)
    lines = [line for line in caplog.messages if "trains nothing, because the weights" in line]
    assert [line.partition("(")[2][:1] for line in lines] == ["1", "2", "4"]
