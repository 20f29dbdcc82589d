"""Model, data, loss and optimizer of a training, for workers and for plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from distributed.scripts import FEATURES, problem, token_weights

CLASSES, IGNORED = 3, -100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """Model, data and optimizer of a training.

    Attributes:
        samples: samples per epoch.
        dtype: type of model and data.
        batch_norm: whether the model has layers that mix samples.
        local: whether these take statistics of each micro-batch.
        tokens: whether samples have different weights, some of them 0.
        adam: AdamW instead of SGD with momentum.
        decay: factor on the learning rate in each step of its schedule; 1 means no scheduler.
        clip_norm, clip_value: as for ``step.apply``.
        spike: (step, factor on its loss).
        stream: the data set is an iterator; the order is the same.
        widths: of the hidden layers.
        tied: hidden layers of equal width share their weights.
        error: ``squares``, ``huber``, or ``classes`` with some labels to be ignored.
        autocast: whether the twin computes in bf16; a job does so by its precision.
        passes: over the micro-batches of a step: ``one``; ``updates``, two with an update each; or ``ascent``, where
            the first one moves the weights for the second one, as in SAM.
    """

    samples: int = 90
    dtype: str = "float64"
    batch_norm: bool = False
    local: bool = False
    tokens: bool = False
    adam: bool = False
    decay: float = 1.0
    clip_norm: float | None = None
    clip_value: float | None = None
    spike: tuple[int, float] = (-1, 1.0)
    stream: bool = False
    widths: tuple[int, ...] = (16, 16)
    tied: bool = False
    error: str = "squares"
    autocast: bool = False
    passes: str = "one"

    def data(self) -> torch.utils.data.TensorDataset:
        return torch.utils.data.TensorDataset(
            *(t.to(getattr(torch, self.dtype)) for t in problem(self.samples).tensors)
        )

    def model(self) -> torch.nn.Sequential:
        torch.manual_seed(3)
        layers: list[torch.nn.Module] = []
        known: dict[tuple[int, int], torch.nn.Linear] = {}
        for size, width in zip((FEATURES, *self.widths), self.widths, strict=False):
            linear = torch.nn.Linear(size, width)
            layers += [
                known.setdefault((size, width), linear) if self.tied else linear,
                *([torch.nn.BatchNorm1d(width)] if self.batch_norm else []),
                torch.nn.Tanh(),
            ]
        layers.append(torch.nn.Linear(self.widths[-1], CLASSES if self.error == "classes" else 1))
        return torch.nn.Sequential(*layers).to(getattr(torch, self.dtype))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=0.01)
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> tuple[torch.Tensor, float]:
        output = model(x)
        if self.error == "classes":
            classes = (y.flatten() > 0).long() + (y.flatten() > 6).long()
            classes[x[:, 1] > 1] = IGNORED
            total = torch.nn.functional.cross_entropy(output, classes, ignore_index=IGNORED, reduction="sum")
            return total, float((classes != IGNORED).sum())
        errors = (
            torch.nn.functional.huber_loss(output, y, reduction="none") if self.error == "huber" else (output - y) ** 2
        )
        weights = token_weights(x) if self.tokens else torch.ones_like(errors)
        return (errors * weights).sum() * (self.spike[1] if step == self.spike[0] else 1.0), float(weights.sum())
