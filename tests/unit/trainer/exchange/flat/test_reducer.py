"""Buckets: their parameters, their gradients and the start of their reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.exchange.flat import buckets, gradient_hooks
from heterotrain.exchange.flat.buckets import MIB, WholeBucket
from heterotrain.exchange.flat.gradient_hooks import MOST_SURPRISES
from heterotrain.exchange.flat.reducer import Reducer
from hypothesis import given
from hypothesis import strategies as st
from support.noted_exchange import NotedExchange


def test_the_first_bucket_is_small_and_holds_the_last_layers() -> None:
    """It can travel while backward still computes the others; a smaller bucket size applies to it as well."""
    layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(16)]  # a quarter of a MiB each
    for limit, expected in ((2 * MIB, [4, 8, 4]), (MIB // 2, [2] * 8)):
        reducer = Reducer(torch.nn.Sequential(*layers), bucket_bytes=limit)
        reducer.begin()
        assert [len(bucket.parameters) for bucket in reducer.buckets] == expected
        assert reducer.buckets[0].parameters[0] is layers[-1].weight


def test_a_large_layer_does_not_leave_the_first_bucket_empty() -> None:
    """A classifier of a few kilobytes alone would leave the network idle."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)], torch.nn.Linear(1024, 10))
    reducer = Reducer(model, bucket_bytes=25 * MIB)
    reducer.begin()
    assert [len(bucket.parameters) for bucket in reducer.buckets] == [3, 2]


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=30), enough=st.integers(100, 1500))
def test_buckets_equal_those_of_ddp(sizes: list[int], enough: int) -> None:
    """Torch's own assignment is the oracle, over parameters in the order in which their gradients arrive."""
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    indices, _ = torch.distributed._compute_bucket_assignment_by_size(parameters[::-1], [400, 4 * enough])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "FIRST_BUCKET_BYTES", 400)
        ours = buckets.buckets_of(parameters[::-1], enough_bytes=4 * enough)
    assert [[id(p) for p in bucket.parameters] for bucket in ours] == [
        [id(parameters[-1 - index]) for index in bucket] for bucket in indices
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_the_gradient_is_known_as_long_as_nothing_changes_it(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    reducer = Reducer(model, bucket_bytes=64)

    def norm() -> float:
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))

    reducer.begin()
    reducer.arm(None)
    model(torch.randn(3, 8, dtype=dtype)).sum().backward()
    reducer.flush()
    reducer.wait()
    assert reducer.is_finite()
    known = [bucket.squared for bucket in reducer.buckets]
    assert (None in known) is (dtype is torch.bfloat16), "half formats would overflow"
    for factor in (1.0, 0.37):
        reducer.scale(factor)
        assert math.sqrt(reducer.squared_norm()) == pytest.approx(norm(), rel=1e-6 if dtype.itemsize > 2 else 1e-2)
    model[0].weight.grad[0] *= 100.0
    assert reducer.buckets[-1].squared is None
    assert math.sqrt(reducer.squared_norm()) == pytest.approx(norm(), rel=1e-6 if dtype.itemsize > 2 else 1e-2)


def test_gradients_that_a_script_points_elsewhere_are_back_in_their_buckets_with_the_next_step() -> None:
    """``parameter.grad.data = x`` leaves the object, which is a view of a bucket, and takes its memory away."""
    model = torch.nn.Linear(3, 2).double()
    reducer = Reducer(model, bucket_bytes=1)
    for number in range(3):
        reducer.begin()
        reducer.arm(None)
        model(torch.full((2, 3), 1.0 + number, dtype=torch.float64)).sum().backward()
        reducer.flush()
        reducer.check_untouched()
        sent = torch.cat([bucket.flat for bucket in reducer.buckets])
        assert sent.tolist() == [2.0, 2.0, *6 * [2.0 * (1.0 + number)]]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data * 0.5 if number else torch.zeros(7, dtype=torch.float64)
        with pytest.raises(UsageError, match="gradients were changed"):
            reducer.check_untouched()


@pytest.mark.parametrize(("value", "finite"), [(3e38, True), (math.inf, False), (math.nan, False)])
def test_a_norm_that_overflows_is_no_gradient_that_is_not_finite(value: float, finite: bool) -> None:
    model = torch.nn.Linear(2, 1)
    reducer = Reducer(model, bucket_bytes=1)
    reducer.begin()
    reducer.arm(None)
    model(torch.tensor([[value, 1.0]])).sum().backward()
    reducer.flush()
    reducer.wait()
    assert reducer.is_finite() is finite


@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("large_bytes", [gradient_hooks.LARGE_BYTES, 64, 0])
def test_gradients_of_micro_batches_add_up_and_unused_parameters_count_as_zero(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int, unused: bool
) -> None:
    """The flat buffers hold the same sums as in plain torch, whatever an earlier step left there."""
    monkeypatch.setattr(
        gradient_hooks, "LARGE_BYTES", large_bytes
    )  # gradients of this size move at once, others with the last one of their bucket
    torch.manual_seed(1)
    used = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model = torch.nn.ModuleDict({"used": used, **({"unused": torch.nn.Linear(2, 2)} if unused else {})}).double()
    reducer = Reducer(model, bucket_bytes=200)
    x = torch.randn(6, 3, dtype=torch.float64)
    for sizes in ((6,), (1, 2, 3), (6,), (6,), (4, 2)):
        reducer.begin(micro_batches=len(sizes))
        for number, part in enumerate(x.split(sizes)):
            if number == len(sizes) - 1:
                reducer.arm(None)
            model["used"](part).square().sum().backward()
        reducer.flush()
        wanted = torch.autograd.grad(model["used"](x).square().sum(), list(model["used"].parameters()))
        for parameter, value in zip(model["used"].parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, value, rtol=1e-14, atol=0)
        if unused:
            assert not any(float(p.grad.abs().max()) for p in model["unused"].parameters() if p.grad is not None)
        for bucket in reducer.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                assert parameter.grad is view
        reducer.scale(17.0)  # the next step must not see what this one leaves


def test_gradients_changed_between_backward_passes_are_noticed() -> None:
    """In place or by dropping them; also those that are waiting to be added up over ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes: list[Callable[[], object]] = [
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    ]
    for change, after_the_last in product(changes, (False, True)):
        reducer = Reducer(model, bucket_bytes=40)
        reducer.begin(micro_batches=2)
        model(torch.ones(2, 3)).sum().backward()
        reducer.remember()
        reducer.check_untouched()
        if after_the_last:
            reducer.arm(None)
            model(torch.ones(2, 3)).sum().backward()
            reducer.flush()
            reducer.check_untouched()
        change()
        with pytest.raises(UsageError, match="behind the loop over step"):
            reducer.check_untouched()


class NoGradient(torch.autograd.Function):
    """Takes parameters, and returns none as their gradients."""

    @staticmethod
    def forward(_ctx: Any, loss: torch.Tensor, *_parameters: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of the loss."""
        return gradients[0], *[None for _ in ctx.needs_input_grad[1:]]


@pytest.mark.parametrize("is_reached", [False, True], ids=["not reached", "none returned"])
def test_parameters_unused_by_all_ranks_have_no_gradient(is_reached: bool) -> None:
    """In every kind of step; a parameter that another rank has used keeps its place in the sum."""
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3, bias=False) for _ in range(4))
    reducer, seen = Reducer(model, bucket_bytes=40), list[torch.Size]()
    for micro_batches, used in ((1, (0, 1, 2, 3)), (1, (0, 3)), (1, (0, 1, 2, 3)), (2, (1, 2)), (2, (0, 1, 2, 3))):
        reducer.begin(micro_batches=micro_batches)
        reducer.watch(lambda _parameter, gradient: seen.append(gradient.shape))
        for number in range(micro_batches):
            if number == micro_batches - 1:
                reducer.arm(None)
            loss = sum(model[i](torch.ones(1, 3)).sum() for i in used)
            (NoGradient.apply(loss, *model.parameters()) if is_reached else loss).backward()
        reducer.flush()
        layers = {id(layer.weight): i for i, layer in enumerate(model)}
        places = [layers[id(p)] for bucket in reducer.buckets for p in bucket.parameters]
        assert [bool(reducer.unused >> bit & 1) for bit in range(4)] == [place not in used for place in places]
        elsewhere = sum(1 << bit for bit, place in enumerate(places) if place == 3)  # used by another rank only
        reducer.drop_unused(reducer.unused & ~elsewhere)
        assert [layer.weight.grad is not None for layer in model] == [i in used or i == 3 for i in range(4)]
        assert not reducer.take_back()


def test_frozen_unfrozen_and_added_layers_change_the_buckets() -> None:
    """The change takes effect when the next step begins."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    reducer = Reducer(model, bucket_bytes=MIB)

    def parameters() -> int:
        reducer.begin()
        return sum(len(bucket.parameters) for bucket in reducer.buckets)

    assert parameters() == 4
    model[0].requires_grad_(requires_grad=False)
    assert parameters() == 2
    model[0].requires_grad_()
    assert parameters() == 4
    model[1].append(torch.nn.Linear(2, 2))
    assert parameters() == 6


class Branches(torch.nn.Module):
    """Two branches whose gradients arrive in the order of forward's calls; each layer has a quarter of a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False)
        self.a_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number that depends on both branches."""
        if self.a_first:
            return self.a(self.b(x).tanh()).square().mean()
        return self.b(self.a(x).tanh()).square().mean()


def test_a_bucket_is_sent_during_backward_for_any_order() -> None:
    """The first step records the last gradient; if another one is last, the bucket is sent late but correctly."""
    torch.manual_seed(2)
    model, x = Branches(), torch.randn(3, 256)
    sent: list[str] = []
    where = [""]
    reducer = Reducer(model, bucket_bytes=MIB, exchange=NotedExchange(lambda: sent.append(where[0])))
    calls = []
    orders = [True, True, False, False, False, True, True, True, *[False, True] * (2 * MOST_SURPRISES)]
    for model.a_first in orders:
        reducer.begin()
        reducer.arm(None)
        where[0] = "in backward"
        model(x).backward()
        where[0] = "after it"
        reducer.flush()
        wanted = torch.autograd.grad(model(x), list(model.parameters()))
        for parameter, value in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, value)
        assert reducer._hooks is not None
        calls.append(len(reducer._hooks._hooks))
    assert sent[:8] == [
        "in backward",
        "in backward",
        "after it",
        *["in backward"] * 2,
        "after it",
        *["in backward"] * 2,
    ]
    assert calls[:8] == [2, 1, 1, 2, 1, 1, 2, 1]
    assert sent[-2:] == ["in backward"] * 2, "after too many wrong orders, no order is recorded"
    assert calls[-1] == 2


def test_a_gradient_that_arrives_after_its_bucket_was_sent_is_an_error() -> None:
    """This is found even if only a bucket's last parameter has a hook: torch counts the buffer's changes."""
    layer = torch.nn.Linear(4, 4, bias=False)
    reducer = Reducer(layer, bucket_bytes=MIB)
    launched: list[WholeBucket] = []
    x = torch.ones(2, 4)
    for number in range(3):
        reducer.begin()
        reducer.watch_buckets(launched.append)
        reducer.arm(None)
        layer(x).sum().backward()
        if number < 2:
            reducer.flush()
    layer(x).sum().backward()
    with pytest.raises(UsageError, match="use_reentrant=False"):
        reducer.flush()
    assert len(launched) == 3


def test_nothing_waits_for_a_sum_whose_length_is_known_anyway() -> None:
    """A callback of NCCL's waits for the sum in a stream, and on the device other streams may wait behind it."""

    class Sum:
        """Has no ``get_future``."""

        is_timed = True

        def seconds(self) -> float:
            return 0.25

        def settle(self) -> None:
            pass

    group: Any = SimpleNamespace(world_size=2, all_reduce=lambda _flat, _owners: Sum(), wait=lambda _work, _what: None)
    reducer = Reducer(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), bucket_bytes=24)
    for _ in range(2):
        reducer.begin()
        reducer.arm(group)
        reducer.model(torch.ones(1, 3)).sum().backward()
        reducer.flush()
        reducer.exchange.release()
        assert reducer.transfers_s() == ()
        reducer.wait()
        assert reducer.transfers_s() == (0.25,) * len(reducer.buckets)
