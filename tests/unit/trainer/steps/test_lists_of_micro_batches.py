"""Micro-batches that a script takes all at once, or leaves out, in one process: as in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heterotrain import Step, UsageError
from heterotrain.data.order import permutation
from support.one_process import DATA, X, a_job, squared_error


def two_losses(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over marked samples, and the sum over all."""
    output = model(x)
    return ((output - y) ** 2).flatten()[marked(x)].sum(), output.abs().sum()


def marked(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0] > 0.3


def batches() -> Iterator[tuple[torch.Tensor, ...]]:
    for epoch in range(2):
        for chosen in torch.as_tensor(permutation(seed=0, epoch=epoch, epoch_samples=20, shuffle=True)).split(8):
            yield tuple(column[chosen] for column in DATA.tensors)


def plain(loss: Callable[..., torch.Tensor | None]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        if (value := loss(model, x, y)) is not None:
            value.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def both(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a loss with two denominators."""
    some, every = two_losses(model, x, y)
    return some / max(1, int(marked(x).sum())) + every / len(x)


@pytest.mark.parametrize("as_list", [list, tuple, lambda loop: [each for each in loop]], ids=["list", "tuple", "other"])  # noqa: C416  # a comprehension asks for no length
@pytest.mark.parametrize("micro_batch_samples", [None, 3])
def test_two_denominators_are_counted_before_the_first_backward_pass(
    as_list: Any, micro_batch_samples: int | None
) -> None:
    """The loss of the whole batch, with micro-batches of unequal size."""
    job, model, optimizer = a_job(micro_batch_samples=micro_batch_samples)
    for step in job.steps(DATA):
        with step:
            every = as_list(step.micro_batches())
            count = job.sum(marked=float(sum(int(marked(x).sum()) for x, _ in every)))["marked"]
            for x, y in every:
                some, rest = two_losses(model, x, y)
                step.backward(some / max(1.0, count) * step.batch_samples + rest, weight=len(x))
            step.apply(optimizer)
    torch.testing.assert_close(dict(model.state_dict()), plain(both), rtol=1e-12, atol=1e-14)


def test_the_forward_passes_of_a_list_run_in_the_configured_precision() -> None:
    """Each of them; what comes after the last backward pass does not."""
    job, model, optimizer = a_job(micro_batch_samples=3, precision="bf16")
    seen = []
    for step in job.steps(DATA):
        with step:
            for x, y in list(step.micro_batches()):
                seen.append(torch.is_autocast_enabled("cpu"))
                step.backward(squared_error(model, x, y))
            assert not torch.is_autocast_enabled("cpu")
            step.apply(optimizer)
    assert len(seen) == 16
    assert all(seen)


@pytest.mark.parametrize("takes", [iter, list])
@pytest.mark.parametrize("left_out", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}], ids=str)
def test_micro_batches_are_left_out(takes: Any, left_out: set[int]) -> None:
    """The first, the last, all of them: the gradient is the mean over the rest; without any, weights stay."""
    job, model, optimizer = a_job(micro_batch_samples=3)
    for step in job.steps(DATA):
        with step:
            for number, (x, y) in enumerate(takes(step.micro_batches())):
                if number in left_out:
                    step.skip_batch()
                else:
                    step.backward(squared_error(model, x, y))
            step.apply(optimizer)

    def loss(plain_model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        sizes = {8: [2, 3, 3], 4: [1, 3]}[len(x)]
        parts = zip(x.split(sizes), y.split(sizes), strict=True)
        kept = [part for number, part in enumerate(parts) if number not in left_out]
        return squared_error(plain_model, *map(torch.cat, zip(*kept, strict=True))) if kept else None

    torch.testing.assert_close(dict(model.state_dict()), plain(loss), rtol=1e-12, atol=1e-14)


def use(what: Callable[[Step, torch.nn.Module], None], *, layer: torch.nn.Module | None = None) -> None:
    job, model, optimizer = a_job(micro_batch_samples=3)
    if layer is not None:
        model.add_module("more", layer)
    for step in job.steps(DATA):
        with step:
            what(step, model)
            step.apply(optimizer)


def test_leaving_out_is_checked_like_a_backward_pass() -> None:
    """Once for each micro-batch, and not where another rank waits."""

    def twice(step: Step, _: torch.nn.Module) -> None:
        for _batch in step.micro_batches():
            step.skip_batch()
            step.skip_batch()

    def one_missing(step: Step, model: torch.nn.Module) -> None:
        for x, y in list(step.micro_batches())[1:]:
            step.backward(squared_error(model, x, y))

    with pytest.raises(UsageError, match=r"call 2 of step\.skip_batch\. Call step\.backward exactly once"):
        use(twice)
    with pytest.raises(UsageError, match="after 2 of 3 micro-batches"):
        use(one_missing)


def test_gradients_of_a_list_are_complete_in_apply_only() -> None:
    """A change before it would be lost on other ranks, so it is refused."""

    def clip_early(step: Step, model: torch.nn.Module) -> None:
        for x, y in list(step.micro_batches()):
            step.backward(squared_error(model, x, y))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    with pytest.raises(UsageError, match=r"gradients were changed before"):
        use(clip_early)


def test_the_data_has_marked_samples_in_some_batches() -> None:
    """Otherwise the tests above would compare nothing."""
    counts = [int(marked(x).sum()) for x, _ in batches()]
    assert len(set(counts)) > 1
    assert len(X) == 20
