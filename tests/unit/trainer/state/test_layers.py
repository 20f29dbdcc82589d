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


def test_trainable_parameters_are_those_of_the_model() -> None:
    """Also after one was frozen, or a parameter or layer was replaced by another of the same shape."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False))
    layers = Layers(model)

    def agrees() -> bool:
        return layers.trainable_ids() == [id(p) for p in model.parameters() if p.requires_grad]

    assert agrees()
    model[0].bias.requires_grad_(requires_grad=False)
    assert agrees()
    model[0].weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert agrees()
    model[2] = torch.nn.Linear(2, 2, bias=False)
    assert agrees()
