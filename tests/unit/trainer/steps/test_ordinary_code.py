"""Ordinary code around and inside a step gives the result of plain torch, or is refused at once."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import heterotrain
import numpy as np
import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.session import Job
from heterotrain.steps.step import Step
from support.one_process import DATA, X, a_job, squared_error


class Net(torch.nn.Module):
    """Two layers and a branch that only every second forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, 1) for (N, 2)."""
        self.calls += 1
        hidden = self.body(x) if self.calls % 2 else self.body(x) + self.branch(x)
        result: torch.Tensor = self.head(hidden.tanh())
        return result


def a_net() -> Net:
    """Return the model in fp64, the same each time."""
    torch.manual_seed(5)
    return Net().double()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that moves parameters with a gradient of zero, too."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


Code = Callable[[Any, torch.nn.Module, torch.optim.Optimizer], None]


def nothing(_step: Any, _model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Do nothing."""


class Plain:
    """The part of a step that plain torch needs, too."""

    def __init__(self, number: int, epoch: int) -> None:
        self.number, self.epoch = number, epoch


def check_equal_to_plain_torch(*, before: Code = nothing, inside: Code = nothing, after: Code = nothing) -> None:
    """Train with and without the library and compare the weights.

    Args:
        before: called before ``with step:``.
        inside: called inside it, before the micro-batches.
        after: called when the gradient is there, before the update.
    """
    job = heterotrain.init(epochs=3, batch_samples=8)
    model = job.wrap(a_net())
    optimizer = job.optimizer(adam(model))
    batches = []
    for step in job.steps(DATA):
        before(step, model, optimizer)
        with step:
            inside(step, model, optimizer)
            batches.append((step.epoch, list(step.task.ids)))
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            after(step, model, optimizer)
            step.apply(optimizer)
    twin = a_net()
    its = adam(twin)
    for number, (epoch, ids) in enumerate(batches):
        before(Plain(number, epoch), twin, its)
        inside(Plain(number, epoch), twin, its)
        its.zero_grad()
        squared_error(twin, X[ids], DATA.tensors[1][ids]).backward()
        after(Plain(number, epoch), twin, its)
        its.step()
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0, msg=name)


def test_parameters_without_a_gradient_are_left_alone() -> None:
    """Neither momentum nor weight decay moves them in a step that does not use them."""
    check_equal_to_plain_torch()


@pytest.mark.parametrize("where", ["before", "inside"])
def test_freezing_and_thawing_in_the_loop(where: str) -> None:
    """The head is frozen in the second epoch, the body thawed in the third."""

    def freeze(step: Any, model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Net)
        model.body.requires_grad_(step.epoch != 0)
        model.head.requires_grad_(step.epoch != 1)

    check_equal_to_plain_torch(**{where: freeze})


def clip(_step: Any, model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Clip as every loop does."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unscale(_step: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Divide by a loss scale."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(64.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def replace_gradients(_step: Any, model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Give one parameter another tensor as its gradient and another one none."""
    assert isinstance(model, Net)
    assert model.body.weight.grad is not None
    model.body.weight.grad = model.body.weight.grad.sign()
    model.head.bias.grad = None


@pytest.mark.parametrize("code", [clip, unscale, replace_gradients])
def test_gradients_may_be_changed_before_apply(code: Code) -> None:
    """They are complete once the loop over the micro-batches has ended."""
    check_equal_to_plain_torch(after=code)


@pytest.mark.parametrize("way", ["replaced", "by .data", "another .data"])
def test_apply_clips_what_the_script_has_left(way: str) -> None:
    """The norm is that of the changed gradients, also where torch counts no change."""
    job = heterotrain.init(epochs=1, batch_samples=20)
    model = job.wrap(torch.nn.Linear(2, 1).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            left = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
            if way == "replaced":
                model.weight.grad, model.bias.grad = left, None
            elif way == "another .data":
                model.weight.grad.data, model.bias.grad.data = left, torch.zeros(1, dtype=torch.float64)
            else:
                model.weight.grad.data.copy_(left)
                model.bias.grad.data.zero_()
            assert step.apply(optimizer, clip_norm=1.0).gradient_norm == 5.0
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.6, 0.8]], dtype=torch.float64))


def swap(model: torch.nn.Module) -> None:
    """Replace the head by a new one of the same size."""
    torch.manual_seed(9)
    model.head = torch.nn.Linear(4, 1).double()


def test_a_new_head_is_trained() -> None:
    """With a parameter group of its own; the old one stays in the optimizer without a gradient."""

    def exchange(step: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Net)
        if step.number == 4:
            swap(model)
            optimizer.add_param_group({"params": list(model.head.parameters())})

    check_equal_to_plain_torch(before=exchange)


def steps_of(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Step, int]]:
    """Yield steps that have gradients, with the number of each; apply them afterwards."""
    for number, step in enumerate(job.steps(DATA)):
        with step:
            yield step, number
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)


@pytest.mark.parametrize("kind", ["layer", "assign"])
def test_replaced_parameters_that_nothing_trains_are_refused(kind: str) -> None:
    """The optimizer still has the old ones."""
    job = heterotrain.init(epochs=3, batch_samples=8)
    model = job.wrap(a_net())
    optimizer = job.optimizer(adam(model))

    def loop() -> None:
        for _step, number in steps_of(job, model, optimizer):
            if number == 2 and kind == "layer":
                swap(model)
            elif number == 2:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)

    with pytest.raises(UsageError, match="optimizers still have the old ones"):
        loop()


def a_loop(change: Callable[[Step, torch.nn.Module, torch.optim.Optimizer], None], *, inside: bool) -> None:
    """Train with a change in the body of the loop over micro-batches, or after it."""
    job = heterotrain.init(epochs=1, batch_samples=8)
    model = job.wrap(a_net())
    optimizer = job.optimizer(adam(model))
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(model, x, y))
                if inside:
                    change(step, model, optimizer)
            if not inside:
                change(step, model, optimizer)
            step.apply(optimizer)


@pytest.mark.parametrize(
    ("change", "inside", "said"),
    [
        (lambda _s, m, _o: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1), True, r"clip_norm=…"),
        (lambda _s, _m, o: o.zero_grad(), True, r"behind the loop over step\.micro_batches"),
        (lambda _s, m, _o: m.body.requires_grad_(requires_grad=False), True, "do this before the loop"),
        (lambda _s, _m, o: o.zero_grad(), False, r"leave out optimizer\.zero_grad"),
        (lambda _s, _m, o: o.step(), False, r"step\.apply\(optimizer\) in place of optimizer\.step"),
    ],
    ids=["clip", "zero_grad", "freeze", "zero_grad before apply", "optimizer.step"],
)
def test_code_that_cannot_work_is_refused(
    change: Callable[[Step, torch.nn.Module, torch.optim.Optimizer], None], inside: bool, said: str
) -> None:
    """At once, with the right place or call."""
    with pytest.raises(UsageError, match=said):
        a_loop(change, inside=inside)


def test_gradients_changed_between_two_micro_batches_are_refused() -> None:
    """Once, after the first one: the others are added to what is left."""
    job = heterotrain.init(epochs=1, batch_samples=8, micro_batch_samples=2)
    model = job.wrap(a_net())
    optimizer = job.optimizer(adam(model))

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                for number, (x, y) in enumerate(step.micro_batches()):
                    step.backward(squared_error(model, x, y))
                    if number == 0:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                step.apply(optimizer)

    with pytest.raises(UsageError, match=r"clip_norm=…"):
        loop()


def test_all_generators_are_seeded_by_the_step() -> None:
    """The same run draws the same numbers again; so does a repeated step; gradient noise differs between steps."""

    def draws() -> list[tuple[float, ...]]:
        job = heterotrain.init(epochs=1, batch_samples=10)
        model = job.wrap(torch.nn.Linear(2, 1).double())
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found = []

        def draw() -> None:
            found.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002, S311  # as scripts do

        draw()
        for step in job.steps(DATA):
            draw()
            with step:
                draw()
                for x, y in step.micro_batches():
                    step.backward(squared_error(model, x, y))
                if len(found) == 3:
                    raise torch.OutOfMemoryError("once")
                draw()
                step.apply(optimizer)
        return found

    first, second = draws(), draws()
    assert first == second
    assert first[1:3] == first[3:5], "the repeated step draws the same"
    assert len(set(first)) == len(first) - 2


def test_a_model_that_the_loss_does_not_use_is_said_in_the_first_step() -> None:
    """The script trains a copy of its model; plain torch changes nothing then, without a word."""
    job, model, optimizer = a_job(epochs=1)
    other = copy.deepcopy(model)

    def train() -> None:
        for step in job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    step.backward(squared_error(other, x, y))
                step.apply(optimizer)

    with pytest.raises(UsageError, match=r"step 0: no parameter of the model that job\.wrap returned got a gradient"):
        train()


def test_a_later_step_may_have_nothing_to_learn_from() -> None:
    """Losses of pairs or boxes are a constant where a batch has none; plain torch changes nothing then."""
    job, model, optimizer = a_job(epochs=1)
    found = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(torch.zeros((), requires_grad=True) if step.number == 1 else squared_error(model, x, y))
            step.apply(optimizer)
        found.append(model.weight.detach().clone())
    assert found[1].equal(found[0])
    assert not found[2].equal(found[1])
