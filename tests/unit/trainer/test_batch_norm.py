"""BatchNorm that counts over the global batch: by itself it is torch's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from heterotrain.batch_norm import GlobalBatchNorm, Link, synchronise
from heterotrain.errors import UsageError
from torch import nn


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (nn.BatchNorm1d, (7, 3), {}),
        (nn.BatchNorm1d, (5, 3, 4), {"momentum": None}),
        (nn.BatchNorm2d, (4, 3, 2, 5), {"affine": False}),
        (nn.BatchNorm2d, (4, 3, 2, 5), {"track_running_stats": False}),
        (nn.BatchNorm3d, (2, 3, 2, 2, 2), {"eps": 0.1}),
    ],
)
def test_alone_it_is_torchs_own(kind: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Outputs, all gradients and running statistics over several batches, in training and in evaluation."""
    torch.manual_seed(0)
    plain = kind(3, **options).double()
    ours = copy.deepcopy(plain)
    assert synchronise(nn.Sequential(nn.Identity(), ours), Link()) == "1"
    assert isinstance(ours, GlobalBatchNorm)
    assert isinstance(ours, kind)
    for _ in range(3):
        x = (5 + 3 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        weights = torch.randn(*shape, dtype=torch.float64)
        (plain(x) * weights).sum().backward()
        (ours(y) * weights).sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(ours.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=0)
    for own, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=1e-12, atol=0)


def test_half_inputs_are_summed_wide() -> None:
    """The result has the input's format, statistics are those of fp32."""
    layer = nn.BatchNorm1d(2)
    synchronise(layer, Link())
    x = (100 + torch.randn(64, 2, generator=torch.Generator().manual_seed(1))).bfloat16()
    assert layer(x).dtype is torch.bfloat16
    torch.testing.assert_close(layer.running_mean, 0.1 * x.float().mean(0))


def test_a_single_value_is_refused() -> None:
    """As torch does, with what to do."""
    layer = nn.BatchNorm1d(2)
    synchronise(layer, Link())
    with pytest.raises(UsageError, match="more than one sample"):
        layer(torch.ones(1, 2))


def test_models_can_be_copied_and_kept() -> None:
    """A copy takes part in the same steps; one from a file is alone."""
    link = Link()
    model = nn.Sequential(nn.BatchNorm1d(2))
    synchronise(model, link)
    assert copy.deepcopy(model)[0].heterotrain_link is link
    assert pickle.loads(pickle.dumps(model))[0].heterotrain_link.group is None  # noqa: S301 - made a moment ago


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm1d(), nn.SyncBatchNorm(2)])
def test_other_kinds_are_refused(layer: nn.Module) -> None:
    """By name."""
    with pytest.raises(UsageError, match=type(layer).__name__):
        synchronise(nn.Sequential(layer), Link())
