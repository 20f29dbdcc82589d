"""How parameters are put into buckets."""

from __future__ import annotations

import torch
from heterotrain.numerics.reducer import MIB, Reducer


def test_the_first_bucket_is_small_and_holds_the_last_layers() -> None:
    """It can travel while backward still computes the others; a smaller limit holds for it, too."""
    layers = [torch.nn.Linear(256, 256, bias=False) for _ in range(16)]  # a quarter of a MiB each
    for limit, expected in ((2 * MIB, [4, 8, 4]), (MIB // 2, [2] * 8)):
        reducer = Reducer(torch.nn.Sequential(*layers), bucket_bytes=limit)
        reducer.begin()
        assert [len(bucket.parameters) for bucket in reducer.buckets] == expected
        assert reducer.buckets[0].parameters[0] is layers[-1].weight


def test_a_large_layer_does_not_leave_the_first_bucket_empty() -> None:
    """A classifier of a few kilobytes alone would give the link nothing to do."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(3)], torch.nn.Linear(1024, 10))
    reducer = Reducer(model, bucket_bytes=25 * MIB)
    reducer.begin()
    assert [len(bucket.parameters) for bucket in reducer.buckets] == [3, 2]


def test_gradients_of_micro_batches_add_up_and_unused_parameters_count_as_zero() -> None:
    """In the flat buffers, whatever an earlier step left there; as plain torch computes them."""
    torch.manual_seed(1)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(2, 2)}).double()
    reducer = Reducer(model, bucket_bytes=64)
    x = torch.randn(6, 3, dtype=torch.float64)
    for sizes in ((6,), (1, 2, 3), (4, 2)):
        reducer.begin()
        for number, part in enumerate(x.split(sizes)):
            if number == len(sizes) - 1:
                reducer.arm(None)
            model["used"](part).square().sum().backward()
        reducer.flush()
        wanted = torch.autograd.grad(model["used"](x).square().sum(), list(model["used"].parameters()))
        for parameter, value in zip(model["used"].parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, value, rtol=1e-14, atol=0)
        assert not any(float(p.grad.abs().max()) for p in model["unused"].parameters() if p.grad is not None)
        for bucket in reducer.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                assert parameter.grad is view
        reducer.scale(17.0)  # the next step must not see what this one leaves


def test_layers_that_are_frozen_thawed_or_added_change_the_buckets() -> None:
    """Noticed when the next step begins."""
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
