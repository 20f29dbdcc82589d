"""Losses that grow with their micro-batch are found; means, and sums with a divisor of their own, are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain import UsageError
from heterotrain.steps.summed_loss import SummedLosses, check_alike
from support.one_process import DATA, a_job
from torch.nn import functional

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
W = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
SUMS: dict[str, Loss] = {
    "squares": lambda _x, out, y: ((out - y) ** 2).sum(),
    "half": lambda _x, out, y: 0.5 * ((out - y) ** 2).sum(),
    "over a constant": lambda _x, out, y: ((out - y) ** 2).sum() / 16,
    "mse": lambda _x, out, y: functional.mse_loss(out, y, reduction="sum"),
    "cross entropy": lambda _x, out, y: functional.cross_entropy(out, y.argmax(1), reduction="sum"),
    "sum of cross entropies": lambda _x, out, y: functional.cross_entropy(out, y.argmax(1), reduction="none").sum(),
    "binary": lambda _x, out, y: functional.binary_cross_entropy_with_logits(out, y.sigmoid(), reduction="sum"),
    "autoencoder": lambda _x, out, y: functional.mse_loss(out, y, reduction="sum") - 0.5 * (1 + out).sum(),
    "with weight decay": lambda _x, out, y: ((out - y) ** 2).sum() + 0.01 * (W**2).sum(),
    "product": lambda _x, out, _y: (out * out).sum(),
    "negative, in another format": lambda _x, out, _y: -out.sum().double(),
}
OTHERS: dict[str, Loss] = {
    "mean": lambda _x, out, y: ((out - y) ** 2).mean(),
    "mean of sums": lambda _x, out, y: ((out - y) ** 2).sum(1).mean(),
    "over samples": lambda x, out, y: ((out - y) ** 2).sum() / len(x),
    "over tokens": lambda x, out, _y: (out * (x[:, :1] > 0)).sum() / (x[:, 0] > 0).sum(),
    "normalised weights": lambda x, out, _y: (out * (x[:, :1].abs() / x[:, :1].abs().sum())).sum(),
    "weights that are learned": lambda _x, out, _y: (out * out.softmax(0)).sum(),
    "terms": lambda _x, out, y: torch.stack([((out - y) ** 2).mean(), out.abs().mean()]).sum(),
    "mean and weight decay": lambda _x, out, y: ((out - y) ** 2).mean() + 0.01 * (W**2).sum(),
    "classes": lambda _x, out, _y: out.mean(0).sum(),
    "cross entropy": lambda _x, out, y: functional.cross_entropy(out, y.argmax(1)),
}


def look(loss: Loss, sizes: list[int], sums: SummedLosses | None = None) -> SummedLosses:
    sums = sums or SummedLosses()
    for step, size in enumerate(sizes):
        if sums.looks and size not in sums.seen:
            x, y = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(step + 7 * size)).unbind()
            sums.look(loss(x, x @ W, y[:, :3]), size, step=step)
    return sums


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_found_over_micro_batches_of_two_sizes(kind: str) -> None:
    """On one rank, and on two that have one size each."""
    with pytest.raises(UsageError, match=r"sum over samples.*of 3 and 8 samples\): call step\.backward\(loss, weight="):
        look(SUMS[kind], [8, 8, 3, 3])
    codes = [look(SUMS[kind], [size] * 3).code for size in (8, 3, 8)]
    with pytest.raises(UsageError, match=r"step 4: .* of 3 and 8 samples"):
        check_alike([0.0, *codes], step=4)
    check_alike([codes[0], 0.0, codes[2]], step=4)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("sizes", [[8, 8, 3, 3], [2, 1, 2, 1, 4], [3, 6]], ids=str)
def test_what_does_not_grow_is_left_alone(kind: str, sizes: list[int]) -> None:
    """Also where a number of terms or classes is that of the samples."""
    sums = look(OTHERS[kind], sizes)
    check_alike([sums.code, *(look(OTHERS[kind], [size] * 3).code for size in set(sizes))], step=1)


def train(loss: Callable[[Any, torch.Tensor, torch.Tensor], tuple[Any, ...]]) -> None:
    job, model, optimizer = a_job(micro_batch_samples=3)
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(*loss(model, x, y))
            step.apply(optimizer)


def test_a_job_refuses_a_sum_in_its_first_step() -> None:
    """Micro-batches of 2 and 3 samples; with its weight it trains."""
    train(lambda model, x, y: (((model(x) - y) ** 2).sum(), len(x)))
    with pytest.raises(UsageError, match=r"step 0: the loss is a sum over samples"):
        train(lambda model, x, y: (((model(x) - y) ** 2).sum(),))
