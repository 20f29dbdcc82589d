"""Hooks of the script on parameters, in one process with micro-batches: as in plain torch with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain.data.order import permutation
from support.one_process import DATA, a_job, squared_error


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.05, 0.05)


def sign_later(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.sign_().mul_(0.1)


HOOKS: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "clamp": lambda p: p.register_hook(clamp),
    "sign": lambda p: p.register_hook(torch.sign),
    "two": lambda p: (p.register_hook(clamp), p.register_hook(lambda gradient: gradient * 2)),
    "looks only": lambda p: p.register_hook(lambda _: None),
    "after accumulation": lambda p: p.register_post_accumulate_grad_hook(sign_later),
    "removed": lambda p: p.register_hook(clamp).remove(),
}


def plain(kind: str, clip_norm: float | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        HOOKS[kind](parameter)
    for epoch in range(2):
        order = torch.as_tensor(permutation(seed=0, epoch=epoch, epoch_samples=20, shuffle=True))
        for chosen in order.split(8):
            optimizer.zero_grad()
            squared_error(model, *(column[chosen] for column in DATA.tensors)).backward()
            if clip_norm is not None:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
                for gradient in gradients:
                    gradient.mul_(min(1.0, clip_norm / float(norm)))
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("clip_norm", [None, 0.06])
@pytest.mark.parametrize("micro_batch_samples", [None, 3])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_sees_the_gradient_of_the_whole_batch(
    kind: str, micro_batch_samples: int | None, clip_norm: float | None
) -> None:
    """A clamp or a sign of each micro-batch's part would be another step; clipping comes after the hooks."""
    job, model, optimizer = a_job(micro_batch_samples=micro_batch_samples)
    for parameter in model.parameters():
        HOOKS[kind](parameter)
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer, clip_norm=clip_norm)
    torch.testing.assert_close(dict(model.state_dict()), plain(kind, clip_norm), rtol=1e-12, atol=1e-14)


def test_a_hook_is_called_once_a_step_and_can_be_removed_at_any_time() -> None:
    """Not once for each micro-batch; removed in the middle of a step, it is called no more."""
    job, model, optimizer = a_job(micro_batch_samples=3)
    calls: list[int] = []
    number = 0
    handle = next(model.parameters()).register_hook(lambda _: calls.append(number))
    for step in job.steps(DATA):
        number = step.number
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
                if step.number == 3:
                    handle.remove()
            step.apply(optimizer)
    assert calls == [0, 1, 2]
