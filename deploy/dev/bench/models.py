"""Models of the benchmarks, with the samples of a rank in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    optimizer: str = "SGD"
    """A name in ``OPTIMIZERS``."""
    clip_norm: float | None = None
    channels_last: bool = False
    precision: str = "bf16"
    """On a GPU; processors take fp32."""
    graphs: bool = False
    """Forward and backward pass as CUDA graphs; those of DDP by ``torch.cuda.make_graphed_callables``."""
    confirm: str = "now"
    """As in ``job.steps``."""
    ranks: int = 0
    """On one GPU, connected by NCCL as if each had a host of its own; 0 for one rank on each GPU."""
    goal_ratio: float | None = None
    """Upper end of the 95 % interval of the time beyond DistributedDataParallel that is aimed at."""

    def sample(self) -> torch.Tensor:
        """Return the input of a step on the GPU."""
        shape = (self.share_samples, *self.shape)
        found = torch.randint(self.vocabulary, shape) if self.vocabulary else torch.randn(shape)
        return self.formatted(found.cuda())

    def formatted_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model in the case's memory format."""
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def formatted(self, x: torch.Tensor) -> torch.Tensor:
        """Return a batch in the case's memory format."""
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


FUSED = torch.cuda.is_available() or None
"""On a GPU as the job chooses where the script leaves it open, so both sides have the same kernels. On a CPU, a row
without ", fused" compares what each side chooses by itself."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=FUSED),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=FUSED),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}


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


class Bottleneck(torch.nn.Module):
    """Three convolutions around which the input is added (He et al. 2016, "Deep residual learning")."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, width, 1, bias=False), torch.nn.BatchNorm2d(width), torch.nn.ReLU(inplace=True),
            torch.nn.Conv2d(width, width, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(inplace=True), torch.nn.Conv2d(width, outputs, 1, bias=False), torch.nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around: torch.nn.Module = torch.nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = torch.nn.Sequential(
                torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False), torch.nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, 4 W, H, B) of (N, C, H, B)."""
        return torch.relu(self.body(x) + self.around(x))


def resnet_50() -> torch.nn.Module:
    """Return the network of 53 convolutions and normalizations and 25.6 million parameters, for 1,000 classes."""
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and width > 64 else 1))  # noqa: PLR2004  # the first stage keeps its size
            inputs = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, 1000)]
    return torch.nn.Sequential(*layers)


class Mean(torch.nn.Module):
    """The mean over a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, E) of (N, S, E)."""
        return x.mean(1)


_MLP = Case(
    name="MLP, 8 layers of 1024", share_samples=64, make=lambda: mlp(1024, 8), shape=(1024,)
)  # fmt: skip
_TRANSFORMER = Case(
    name="transformer, 6 layers of 384", share_samples=8, make=lambda: transformer(384, 6), shape=(48, 384),
)  # fmt: skip
CASES = (
    Case(name="MLP, 2 layers of 64", share_samples=32, make=lambda: mlp(64, 2), shape=(64,)),
    Case(name="convolutions, 16 channels", share_samples=2, make=lambda: convolutions(16), shape=(3, 32, 32)),
    Case(name="convolutions, 16 channels", share_samples=10, make=lambda: convolutions(16), shape=(3, 32, 32)),
    _MLP,
    Case(name="convolutions, 32 channels", share_samples=40, make=lambda: convolutions(32), shape=(3, 32, 32)),
    _TRANSFORMER,
    replace(_MLP, name="MLP, 8 layers of 1024, fused on both sides", optimizer="SGD, fused"),
    replace(_TRANSFORMER, name="transformer, 6 layers of 384, fused on both sides", optimizer="SGD, fused"),
    replace(_TRANSFORMER, name="transformer, 6 layers of 384, AdamW, clip", optimizer="AdamW", clip_norm=1.0),
    replace(
        _TRANSFORMER, name="transformer, 6 layers of 384, AdamW, clip, fused on both sides", optimizer="AdamW, fused",
        clip_norm=1.0,
    ),
)  # fmt: skip
"""Steps of two to some hundred milliseconds; MLPs and transformers have gradients of 34 and 43 MB to exchange."""

_CONVOLUTIONS = Case(
    name="convolutions, 128 channels", share_samples=512, make=lambda: convolutions(128), shape=(3, 32, 32),
    goal_ratio=0.02,
)  # fmt: skip
_RESNET = Case(
    name="ResNet-50, channels_last",
    share_samples=64,
    make=resnet_50,
    shape=(3, 160, 160),
    channels_last=True,
    optimizer="SGD, fused",
    goal_ratio=0.02,
)

_LANGUAGE_MODEL = Case(
    name="language model, 12 layers of 768, AdamW, clip", share_samples=32, shape=(512,), vocabulary=50_257,
    make=lambda: language_model(768, 12, 50_257), optimizer="AdamW", clip_norm=1.0, goal_ratio=0.02,
)  # fmt: skip
GPU_CASES = (
    _MLP,
    _CONVOLUTIONS,
    _LANGUAGE_MODEL,
    _RESNET,
    replace(_MLP, name="MLP with graphs", graphs=True, precision="fp32", goal_ratio=0.0),
    replace(_CONVOLUTIONS, name="convolutions, fp16", precision="fp16", goal_ratio=None),
    replace(_CONVOLUTIONS, name="convolutions, 2 NCCL ranks on the card", share_samples=256, ranks=2, goal_ratio=None),
    replace(_RESNET, name="ResNet-50, 2 NCCL ranks, statistics of all", share_samples=32, ranks=2, goal_ratio=None),
    replace(_CONVOLUTIONS, name="convolutions, confirmed late", confirm="late", goal_ratio=0.005),
    replace(_LANGUAGE_MODEL, name="language model, confirmed late", confirm="late", goal_ratio=0.005),
)  # fmt: skip
"""For a data-centre GPU: the first's steps are mostly the start of kernels, and the others keep the device busy."""


class Numbers(torch.utils.data.Dataset[Any]):
    """Random inputs and classes; returns several samples at once, as data sets of tensors can."""

    def __init__(self, shape: tuple[int, ...], vocabulary: int = 0, *, samples: int = 4096) -> None:
        self.samples = samples
        generator = torch.Generator().manual_seed(5)
        if vocabulary:
            self.x = torch.randint(vocabulary, (512, *shape), generator=generator)
        else:
            self.x = torch.randn(512, *shape, generator=generator)
        self.y = torch.randint(10, (512,), generator=generator)

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(ids) % len(self.x)
        return self.x[chosen], self.y[chosen]


def ready(batch: Any) -> Any:
    """Return the batch unchanged, because the data set has already made it."""
    return batch
