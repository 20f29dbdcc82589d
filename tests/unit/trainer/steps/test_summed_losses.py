"""Losses that grow with their micro-batch are found; means, and sums with a divisor of their own, are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heterotrain import UsageError
from heterotrain.steps.summed_loss import SummedLosses, check_alike
from heterotrain.steps.uneven_mean import UNEVEN
from support.one_process import DATA, a_job
from torch.nn import functional

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
W = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Named(torch.autograd.Function):
    """A script's function, whose context is a node of the graph and has the name of one of its methods."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.name = "loss"
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def doubled(loss: torch.Tensor, times: int = 60) -> torch.Tensor:
    """Return a loss to which more ways lead than could be walked."""
    for _ in range(times):
        loss = (loss + loss) / 2
    return loss


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
    "recurrence": lambda _x, out, _y: doubled(out.sum()),
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
    "a function": lambda _x, out, _y: Named.apply(out.mean()),  # type: ignore[no-untyped-call]  # torch's
    "made up for": lambda x, out, y: (
        functional.cross_entropy(out, y.argmax(1).masked_fill(x[:, 0] < 0, -100)) * ((x[:, 0] >= 0).sum() / len(x))
    ),
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


CLASSES = torch.tensor([1.0, 2.0, 5.0])
UNLIKE: dict[str, Loss] = {
    "weights of classes": lambda _x, out, y: functional.cross_entropy(out, y.argmax(1), weight=CLASSES),
    "targets that count": lambda x, out, y: functional.cross_entropy(out, y.argmax(1).masked_fill(x[:, 0] < 0, -100)),
    "with smoothing": lambda _x, out, y: functional.cross_entropy(
        out, y.argmax(1), weight=CLASSES, label_smoothing=0.1
    ),
    "over tokens": OTHERS["over tokens"],
    "recurrence": lambda _x, out, y: doubled(out[y > 0].square().mean()),
    "chosen elements": lambda _x, out, y: out[y > 0].square().mean() / 2,
    "chosen rows": lambda x, out, y: functional.mse_loss(out[x[:, 0] > 0], y[x[:, 0] > 0]) + out.abs().mean(),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_mean_over_something_else_is_said_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where micro-batches of one rank differ, and where those of two ranks do."""
    one = SummedLosses()
    for size in (8, 8, 3):
        x, y = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(size + one.means._looks)).unbind()
        one.look(UNLIKE[kind](x, x @ W, y[:, :3]), size, step=0)
    assert one.code_of(0) == UNEVEN
    assert one.code_of(1) == 0.0
    ranks = [look(UNLIKE[kind], [size] * 5) for size in (9, 4)]
    codes = [rank.code_of(4) for rank in ranks]
    assert max(codes) < 0.0
    for told in (ranks[0], one):
        caplog.clear()
        for _ in range(2):
            told.means.hear(codes, step=1, tells=True)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "step 1: the loss is a mean over something else than samples" in said
    check_alike([*codes, UNEVEN], step=1)


@pytest.mark.parametrize("kind", sorted({*OTHERS} - {*UNLIKE}))
def test_a_mean_over_samples_is_no_other_mean(kind: str) -> None:
    """Also with smoothing, and with terms that have nothing to do with the samples."""
    for sizes in ([8, 8, 3, 3, 8], [3, 6], [4] * 9):
        sums = look(OTHERS[kind], sizes)
        assert sums.code_of(len(sizes) - 1) >= 0.0


def test_texts_of_one_length_in_a_step_fit_together() -> None:
    """Batches that are sorted by length have other denominators in each step, but the same ratio on all ranks."""
    ranks = [SummedLosses(), SummedLosses()]
    for step, length in enumerate([3, 5, 4]):
        for rank, size in zip(ranks, (8, 2), strict=True):
            rank.look((torch.randn(size, length, 4) @ W).square().mean(), size, step=step)
        ranks[0].means.hear([rank.code_of(step) for rank in ranks], step=step, tells=True)
        assert ranks[0].code_of(step) == (ranks[1].code_of(step) if step else 0.0)
    assert ranks[0].looks


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


def test_a_job_says_that_a_mean_is_not_that_of_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """Once; nothing with a sum and its weight, nor for a step of one micro-batch."""

    def masked(model: Any, x: torch.Tensor, _y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = x[:, 0].abs()
        return (model(x)[:, 0] * weight).sum(), weight.sum()

    train(masked)
    assert not [record for record in caplog.records if "something else than samples" in record.getMessage()]
    train(lambda model, x, y: (masked(model, x, y)[0] / masked(model, x, y)[1],))
    assert len([record for record in caplog.records if "something else than samples" in record.getMessage()]) == 1
