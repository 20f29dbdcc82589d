"""The value that ``step.apply`` returns, in one process."""

from __future__ import annotations

import dataclasses
import math

import heterotrain
import pytest
import torch
from heterotrain import Step, StepResult, UsageError
from support.one_process import DATA, a_job, squared_error


def results(**options: float) -> list[tuple[StepResult, float, float]]:
    """Train one epoch; return each step's result with the loss and gradient norm of plain torch."""
    job, model, optimizer = a_job(epochs=1)
    found = []
    for step in job.steps(DATA):
        x, y = (torch.stack(list(part)) for part in zip(*(DATA[i] for i in step.task.ids), strict=True))
        loss = squared_error(model, x, y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.hypot(*(float(g.norm()) for g in gradients))
        with step:
            for a, b in step.micro_batches():
                step.backward(squared_error(model, a, b))
            result = step.apply(optimizer, **options)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-12)
        found.append((result, float(loss.detach()), norm))
    return found


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e-3}, {"clip_value": 1e-3}], ids=str)
def test_a_step_returns_loss_norm_before_clipping_and_samples(options: dict[str, float]) -> None:
    """They are those of plain torch on the same batch; the last step of the epoch is smaller."""
    found = results(**options)
    assert [(r.samples, r.weight, r.learning_rates, r.skipped) for r, *_ in found] == [
        (8, 8.0, (0.1,), False), (8, 8.0, (0.1,), False), (4, 4.0, (0.1,), False),
    ]  # fmt: skip
    assert [r.loss for r, *_ in found] == pytest.approx([loss for _, loss, _ in found], rel=1e-12)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0][0].loss = 0.0  # type: ignore[misc]  # it is a value


def test_a_norm_that_was_not_read_in_time_is_an_error() -> None:
    """The gradient is not kept for it, and a wrong number would be worse than none."""
    job, model, optimizer = a_job(epochs=1)
    kept = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            kept.append(step.apply(optimizer))
    assert kept[-1].gradient_norm > 0
    with pytest.raises(UsageError, match=r"right after step\.apply"):
        _ = kept[0].gradient_norm


def test_rates_are_listed_by_optimizer_and_group_as_used() -> None:
    """The factor of the learning-rate rule is in them; a schedule shows in the next step."""
    job, model, first = a_job(epochs=1)
    second = job.optimizer(
        torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}])
    )
    job.scheduler(torch.optim.lr_scheduler.ExponentialLR(first, 0.5))
    seen = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            seen.append(step.apply(first, second).learning_rates)
    assert seen == [(0.1, 0.5, 0.25), (0.05, 0.5, 0.25), (0.025, 0.5, 0.25)]


def test_a_skipped_step_gives_the_reason() -> None:
    """An overflow in fp16 leaves the weights as they were and the norm unknown."""
    job, model, optimizer = a_job(epochs=1, batch_samples=20, precision="fp16")
    model.float()
    before = model.weight.detach().clone()
    for step in job.steps(torch.utils.data.TensorDataset(*(t.float() for t in DATA.tensors))):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y) * 1e38)
            result = step.apply(optimizer)
        assert result.skipped
        assert "overflowed in fp16" in result.skip_reason
        assert math.isnan(result.gradient_norm)
    torch.testing.assert_close(model.weight, before, rtol=0, atol=0)


def test_a_repeated_step_says_so() -> None:
    """The first attempt runs out of memory; the second one, and the next step, do not."""
    job, model, optimizer = a_job(epochs=1)
    seen = []
    for step in job.steps(DATA):
        seen.append((step.number, step.is_retry))
        with step:
            for x, y in step.micro_batches():
                if len(x) > 4:
                    raise torch.OutOfMemoryError("too much")
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
    assert seen == [(0, False), (0, True), (1, False), (2, False)]


def test_fit_hands_each_committed_step_and_its_result_to_a_function() -> None:
    """Three steps, with a loss that falls."""
    seen: list[tuple[int, StepResult]] = []

    def on_step(step: Step, result: StepResult) -> None:
        seen.append((step.number, result))

    heterotrain.fit(
        torch.nn.Linear(2, 1).double(), DATA, loss=lambda m, b: squared_error(m, *b), on_step=on_step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=1, batch_samples=8,
    )  # fmt: skip
    assert [number for number, _ in seen] == [0, 1, 2]
    assert all(result.loss > 0 and result.learning_rate == 0.1 for _, result in seen)
