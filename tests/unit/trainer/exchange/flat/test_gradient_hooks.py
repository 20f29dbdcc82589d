"""Which parameters call Python in a backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from heterotrain.exchange.flat.buckets import WholeBucket
from heterotrain.exchange.flat.gradient_hooks import LARGE_BYTES, GradientHooks


@pytest.mark.parametrize(("device", "calls"), [("cpu", 2), ("meta", 1)])
def test_only_a_cpu_moves_large_gradients_one_by_one(device: str, calls: int) -> None:
    """There, memory fetched twice costs more than a call; elsewhere a call may hold up the next kernels."""
    sizes = (LARGE_BYTES, 8, 8)
    parameters = [torch.nn.Parameter(torch.empty(size, device=device)) for size in sizes]
    bucket = cast("WholeBucket", SimpleNamespace(parameters=parameters))

    def ignore(*_arguments: Any) -> None:
        return

    hooks = GradientHooks([bucket], arrive=ignore, move=ignore, close=ignore)
    hooks.learn(parameters)
    hooks.begin(one_micro_batch=True)
    assert len(hooks._hooks) == calls
    hooks.end()
