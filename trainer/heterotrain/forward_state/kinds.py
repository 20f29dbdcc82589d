"""The rules for torch's own layers."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase  # the only common base of BatchNorm and InstanceNorm
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from heterotrain.forward_state.rules import Combination, Rule

MEAN, MAX, LEADER = Combination(Rule.MEAN), Combination(Rule.MAX), Combination(Rule.LEADER)
_NORM = {"running_mean": MEAN, "running_var": MEAN, "num_batches_tracked": MAX}
_SPECTRAL: Any = getattr(parametrizations, "_SpectralNorm", ())


def rules_of(layer: torch.nn.Module) -> dict[str, Combination]:
    """Return the rules for a layer's own buffers by name; those of an unknown kind are missing.

    Moving averages of a minimum follow it: the least of them is that of the whole batch. A power iteration looks at
    weights only, so all micro-batches do the same one. A step counts once for a BatchNorm layer if any micro-batch has
    changed its statistics.
    """
    if isinstance(layer, _NormBase):
        return _NORM
    if isinstance(layer, _SPECTRAL):
        return {"_u": LEADER, "_v": LEADER}
    found: dict[str, Combination] = {}
    for hook in layer._forward_pre_hooks.values():  # noqa: SLF001  # where torch keeps the older spectral_norm
        if isinstance(hook, SpectralNorm):
            found |= {f"{hook.name}_u": LEADER, f"{hook.name}_v": LEADER}
    return found | _quantizer_rules(layer)


def _quantizer_rules(layer: Any) -> dict[str, Combination]:
    """Return the rules of observers and fake quantizers; their module is loaded only if a script uses it."""
    observers: Any = sys.modules.get("torch.ao.quantization.observer")
    fakes: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    if observers is not None and isinstance(
        layer, observers.MinMaxObserver | observers.PerChannelMinMaxObserver
    ):  # fmt: skip
        return {"min_val": Combination(Rule.MIN), "max_val": MAX, "eps": LEADER}
    if fakes is not None and isinstance(layer, fakes.FakeQuantizeBase):
        derived = [Combination(Rule.DERIVED, derive=partial(_quantization, place)) for place in range(2)]
        return {
            "scale": derived[0], "zero_point": derived[1], "fake_quant_enabled": LEADER, "observer_enabled": LEADER,
        }  # fmt: skip
    return {}


def _quantization(place: int, layer: Any) -> torch.Tensor | None:
    """Return the scale or zero point that follow from what the layer's observer has seen by now."""
    observer = getattr(layer, "activation_post_process", None)
    low = getattr(observer, "min_val", None)
    if low is None or not int(layer.observer_enabled[0]) or not low.numel() or not bool(torch.isfinite(low).all()):
        return None
    found: torch.Tensor = layer.calculate_qparams()[place]
    return found
