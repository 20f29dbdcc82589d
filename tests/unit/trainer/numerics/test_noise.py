"""Measurements for the noise scale agree with the formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.numerics.noise import Measurement, Preconditioner
from heterotrain.numerics.noise_scale import estimate
from support.repeat import times


def problem() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model and data in fp64."""
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return model, x, x.sum(1, keepdim=True) ** 2


def gradient(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Return the mean gradient by parameter."""
    loss = ((model(x) - y) ** 2).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("cuts", [(12,), (3, 9), (5, 1, 6)])
@pytest.mark.parametrize("adaptive", [False, True])
def test_squares_are_those_of_each_micro_batch(cuts: tuple[int, ...], adaptive: bool) -> None:
    """This holds for any factors on the losses; preconditioned squares are divided as in Adam."""
    model, x, y = problem()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    if adaptive:
        for _ in range(3):
            for parameter, value in zip(model.parameters(), gradient(model, x, y), strict=True):
                parameter.grad = value
            optimizer.step()
    plain = copy.deepcopy(model)
    scale, rank_of = 8.0, 20  # this rank has 12 of the step's 20 samples
    reducer = Reducer(model, bucket_bytes=64)
    reducer.begin(micro_batches=len(cuts))
    preconditioner = Preconditioner([optimizer]) if adaptive else None
    measured = Measurement(reducer, micro_batches=len(cuts), loss_scale=scale, preconditioner=preconditioner)
    parts = list(zip(x.split(cuts), y.split(cuts), strict=True))
    for number, (a, b) in enumerate(parts):
        if number == len(parts) - 1:
            reducer.arm(None)
        (((model(a) - b) ** 2).mean() * (scale * len(a) / rank_of)).backward()
        measured.group_done(float(len(a)))
    reducer.flush()
    reducer.scale(rank_of / (scale * 12))  # as if these 12 were the whole batch
    total = measured.reduced()
    found, preconditioned = measured.squares(batch_samples=rank_of, weight=20.0)

    def square(values: list[torch.Tensor], *, divided: bool) -> float:
        result = 0.0
        for parameter, value in zip(model.parameters(), values, strict=True):
            moment = optimizer.state[parameter]["max_exp_avg_sq"] / (1 - 0.999**3) if divided else None
            result += float(((value if moment is None else value / (moment.sqrt() + 1e-8)) ** 2).sum())
        return result

    each = [gradient(plain, a, b) for a, b in parts]
    whole = gradient(plain, x, y)
    assert found.weighted == pytest.approx(
        sum(n * square(g, divided=False) for n, g in zip(cuts, each, strict=True)), rel=1e-10
    )
    assert (found.groups, found.total) == (len(cuts), pytest.approx(square(whole, divided=False), rel=1e-10))
    assert total == found.total
    if adaptive:
        assert preconditioned.weighted == pytest.approx(
            sum(n * square(g, divided=True) for n, g in zip(cuts, each, strict=True)), rel=1e-10
        )
        assert preconditioned.total == pytest.approx(square(whole, divided=True), rel=1e-10)


def test_one_rank_that_accumulates_finds_the_noise() -> None:
    """Micro-batches of unequal sizes are groups like ranks: over many draws, both estimates meet the true values."""
    truth, deviation = torch.full((6,), 0.3, dtype=torch.float64), 1.5
    model = torch.nn.Linear(6, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    reducer = Reducer(model, bucket_bytes=1000)
    generator = torch.Generator().manual_seed(6)
    cuts, signal, spread = (1, 2, 5), [], []
    draws = times(gate=1500, every=3000)
    for _ in range(draws):
        reducer.begin(micro_batches=3)
        measured = Measurement(reducer, micro_batches=3, loss_scale=1.0, preconditioner=None)
        for number, size in enumerate(cuts):
            x = truth + deviation * torch.randn(size, 6, generator=generator, dtype=torch.float64)
            if number == 2:
                reducer.arm(None)
            (model(x).mean() * (size / 8)).backward()  # the gradient is the mean of x
            measured.group_done(float(size))
        reducer.flush()
        measured.reduced()
        squares, _ = measured.squares(batch_samples=8, weight=8.0)
        sample = estimate(
            weighted_squares=squares.weighted, total_squared=squares.total, samples=8, groups=squares.groups
        )
        assert sample is not None
        signal.append(sample.gradient_squared)
        spread.append(sample.variance)
    assert sum(signal) / draws == pytest.approx(float(truth @ truth), rel=0.05)
    assert sum(spread) / draws == pytest.approx(6 * deviation**2, rel=0.02)


def test_nothing_is_divided_before_the_first_step() -> None:
    """Adam has no second moments yet; parameters without an optimizer do not count."""
    model, x, y = problem()
    optimizer = torch.optim.Adam(model[0].parameters())
    assert not Preconditioner([optimizer]).is_known
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    known = Preconditioner([optimizer])
    assert known.is_known
    assert float(known.square(model[2].weight, torch.ones_like(model[2].weight))) == 0.0
