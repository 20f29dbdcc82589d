"""What to write in place of names that scripts bring along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.ported_names import _ARGUMENTS, _ATTRIBUTES, advice
from heterotrain.session import Job
from heterotrain.steps.result import StepResult
from heterotrain.steps.step import Step
from support.one_process import DATA, a_job, squared_error


def parts() -> dict[str, Any]:
    """Return a job, a model, a step and its result."""
    job, model, optimizer = a_job(epochs=1)
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            result = step.apply(optimizer)
    return {"Job": job, "Step": step, "StepResult": result, "Module": model}


def test_a_name_of_another_library_gets_the_one_that_is_meant() -> None:
    every = parts()
    assert every.keys() == _ATTRIBUTES.keys()
    for kind, names in _ATTRIBUTES.items():
        for name in names:
            with pytest.raises(AttributeError) as raised:
                getattr(every[kind], name)
            assert advice(raised.value).startswith(f"heterotrain: in place of .{name}, write ")
    with pytest.raises(AttributeError) as raised:
        every["Job"].world_size  # noqa: B018  # it raises
    assert "job.part divides data" in advice(raised.value)


@pytest.mark.parametrize("name", _ARGUMENTS)
def test_an_argument_of_another_library_gets_what_to_do(name: str) -> None:
    job, model, optimizer = a_job(epochs=1)

    def train() -> None:
        for step in job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    loss: Any = squared_error(model, x, y)
                    step.backward(loss, **({} if name == "max_norm" else {name: True}))
                step.apply(optimizer, **({"max_norm": 1.0} if name == "max_norm" else {}))  # type: ignore[arg-type]  # as scripts have it

    with pytest.raises(TypeError) as raised:
        train()
    assert advice(raised.value).startswith(f"heterotrain: in place of {name}=, ")


def test_names_that_are_offered_exist() -> None:
    kinds = {"job": Job, "step": Step, "result": StepResult}
    for names in _ATTRIBUTES.values():
        for text in names.values():
            for word in text.replace(",", " ").replace("(", " ").split():
                owner, _, name = word.partition(".")
                if owner in kinds and name:
                    assert hasattr(kinds[owner], name) or name in kinds[owner].__dataclass_fields__, word


@pytest.mark.parametrize("fails", [lambda: torch.nn.Linear(1, 1).nothing, lambda: int("x"), lambda: [].rank])
def test_other_errors_get_no_advice(fails: Callable[[], Any]) -> None:
    with pytest.raises((AttributeError, ValueError)) as raised:
        fails()
    assert advice(raised.value) == ""
