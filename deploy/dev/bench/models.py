"""Models of the benchmarks, with the samples of a rank in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with the samples of one rank in a step."""

    name: str
    share_samples: int
    make: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0
    """Samples are integers below this; numbers of a normal distribution if it is 0."""


def mlp(width: int, depth: int) -> torch.nn.Module:
    """Return equal linear layers with nonlinearities between them."""
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def convolutions(channels: int) -> torch.nn.Module:
    """Return a small convolutional network for images of 32 by 32."""
    layers: list[torch.nn.Module] = []
    for inputs, outputs in (
        (3, channels),
        (channels, channels),
        (channels, 2 * channels),
        (2 * channels, 2 * channels),
    ):
        layers += [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.GroupNorm(4, outputs), torch.nn.ReLU()]
    pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2 * channels, 10)]
    return torch.nn.Sequential(*layers, *pool)


def transformer(width: int, depth: int) -> torch.nn.Module:
    """Return an encoder over sequences of vectors, and a linear layer over the mean of its output."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return torch.nn.Sequential(encoder, Mean(), torch.nn.Linear(width, 10))


def language_model(width: int, depth: int, vocabulary: int) -> torch.nn.Module:
    """Return the transformer with an embedding of integers before it."""
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), transformer(width, depth))


class Mean(torch.nn.Module):
    """The mean over a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, E) of (N, S, E)."""
        return x.mean(1)


CASES = (
    Case(name="MLP, 2 layers of 64", share_samples=32, make=lambda: mlp(64, 2), shape=(64,)),
    Case(name="convolutions, 16 channels", share_samples=2, make=lambda: convolutions(16), shape=(3, 32, 32)),
    Case(name="convolutions, 16 channels", share_samples=10, make=lambda: convolutions(16), shape=(3, 32, 32)),
    Case(name="MLP, 8 layers of 1024", share_samples=64, make=lambda: mlp(1024, 8), shape=(1024,)),
    Case(name="convolutions, 32 channels", share_samples=40, make=lambda: convolutions(32), shape=(3, 32, 32)),
    Case(name="transformer, 6 layers of 384", share_samples=8, make=lambda: transformer(384, 6), shape=(48, 384)),
)
"""Steps of two to some hundred milliseconds; the fourth and the last have gradients of 34 and 43 MB to exchange."""

GPU_CASES = (
    Case(name="MLP, 8 layers of 1024", share_samples=64, make=lambda: mlp(1024, 8), shape=(1024,)),
    Case(name="convolutions, 128 channels", share_samples=512, make=lambda: convolutions(128), shape=(3, 32, 32)),
    Case(
        name="language model, 12 layers of 768",
        share_samples=32,
        make=lambda: language_model(768, 12, 50_257),
        shape=(512,),
        vocabulary=50_257,
    ),
)
"""For a data-centre GPU: one whose steps are mostly the start of kernels, and two that keep the device busy."""
