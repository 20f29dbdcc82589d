"""Formats of the forward pass, and the loss scale."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.numerics.precision import GROW_AFTER, LossScale, MixedPrecision
from heterotrain_core.contract.choices import Precision

CPU = torch.device("cpu")


def test_the_scale_halves_at_once_and_doubles_late() -> None:
    """The scale is always a power of two, within limits."""
    scale = LossScale(factor=1024.0)
    assert scale.after(finite=False) == LossScale(factor=512.0)
    for _ in range(GROW_AFTER - 1):
        scale = scale.after(finite=True)
    assert scale == LossScale(factor=1024.0, clean_steps=GROW_AFTER - 1)
    assert scale.after(finite=False) == LossScale(factor=512.0)
    assert scale.after(finite=True) == LossScale(factor=2048.0)
    assert LossScale(factor=1.0).after(finite=False).factor == 1.0


class Rows:
    """A group with one other rank, which sends a fixed value."""

    def __init__(self, other: float) -> None:
        self._other = other

    def gather_now(self, values: list[float]) -> list[list[float]]:
        """Return this rank's row and the other's."""
        return [values, [self._other]]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [(True, 1.0, Precision.BF16), (True, 0.0, Precision.FP32), (False, 1.0, Precision.FP32)],
)
def test_auto_is_bf16_only_where_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch, own: bool, other: float, expected: Precision
) -> None:
    """A V100 together with an A100: both use fp32."""
    monkeypatch.setattr("heterotrain.numerics.precision.has_bf16", lambda _device: own)
    precision = MixedPrecision(Precision.AUTO, CPU)
    precision.agree(cast("Group", Rows(other)))
    assert precision.format is expected
    fixed = MixedPrecision(Precision.FP16, CPU)
    fixed.agree(None)  # a fixed setting needs no agreement
    assert fixed.format is Precision.FP16


def test_bf16_on_an_accelerator_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the device and the remedy."""
    monkeypatch.setattr("heterotrain.numerics.precision.has_bf16", lambda _device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla V100")
    with pytest.raises(UsageError, match=r"Tesla V100 cannot compute in it\. Use precision Auto"):
        MixedPrecision(Precision.BF16, torch.device("cuda", 0))
    MixedPrecision(Precision.BF16, CPU)


@pytest.mark.parametrize(
    ("setting", "dtype"), [(Precision.FP32, None), (Precision.BF16, torch.bfloat16), (Precision.FP16, torch.float16)]
)
def test_matrix_products_run_in_the_format(setting: str, dtype: Any) -> None:
    """Parameters keep their dtype; losses are in fp32."""
    layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with MixedPrecision(setting, CPU).autocast():
        out = layer(x)
        loss = torch.nn.functional.mse_loss(out, torch.zeros(4, 2))
    assert out.dtype is (dtype or torch.float32)
    assert (loss.dtype, layer.weight.dtype) == (torch.float32, torch.float32)
