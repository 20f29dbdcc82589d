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
