"""The cached layers of a model agree with those found by walking through it."""

from __future__ import annotations

import torch
from heterotrain.state.layers import Layers


def test_buffers_are_those_that_the_model_names() -> None:
    """Also when a buffer is replaced by another tensor, absent, or part of a layer added later."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.Linear(3, 3)))
    model.register_buffer("own", torch.ones(2))
    model.register_buffer("absent", None)
    layers = Layers(model)

    def agrees() -> bool:
        found, wanted = dict(layers.buffers()), dict(model.named_buffers())
        return found.keys() == wanted.keys() and all(found[name] is wanted[name] for name in wanted)

    assert agrees()
    model.own = torch.zeros(5)
    assert agrees()
    model[1].append(torch.nn.BatchNorm1d(3))
    assert agrees()
    assert len(list(layers.buffers())) == 7


def test_flags_follow_the_parameters() -> None:
    """One flag for each parameter; a layer without parameters changes nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
    layers = Layers(model)
    assert layers.requires_grad_flags() == (True, True, True)
    model[0].bias.requires_grad_(requires_grad=False)
    assert layers.requires_grad_flags() == (True, False, True)
