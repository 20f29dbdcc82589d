"""More loops as people write them: what is ordinary in fine-tuning, in language models and in research code."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from distributed.ordinary_loops import Recipe
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CLASSES = 3


def classes(y: torch.Tensor) -> torch.Tensor:
    """Return a class for each sample's target."""
    return (y.flatten() > 0).long() + (y.flatten() > 0.7).long()


class Smoothing(Recipe):
    """Label smoothing, warm-up and a cosine schedule that is stepped by the job."""

    def __post_init__(self) -> None:
        self.model.head = torch.nn.Linear(8, CLASSES).double()
        super().__post_init__()
        warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 15)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm_up, cosine], [3])

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), classes(y), label_smoothing=0.1)


class Autocast(Recipe):
    """A float32 model with autocast to bf16 around forward pass and loss."""

    def __post_init__(self) -> None:
        self.model.float()
        super().__post_init__()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.mse_loss(self.model(x.float()).float(), y.float())


class Pretrained(Recipe):
    """Starts from weights and an optimizer's state of an earlier run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model.load_state_dict(saved[0])
        self.optimizer = self.make_optimizer()
        self.optimizer.load_state_dict(saved[1])


class Tasks(Recipe):
    """Two heads with losses of their own, added with weights; the second task has labels for some samples only."""

    def __post_init__(self) -> None:
        self.model.second = torch.nn.Linear(8, CLASSES).double()
        super().__post_init__()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.model.body(x)
        second = functional.cross_entropy(self.model.second(hidden), classes(y), reduction="none")
        first = functional.mse_loss(self.model.head(hidden), y, reduction="none").flatten()
        return (first + 0.3 * second * (x[:, 0] > 0)).mean()


class _Clamped(torch.autograd.Function):
    """A clamp whose gradient passes through, as for quantized weights."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x.clamp(-1, 1) * 8).round() / 8

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class StraightThrough(Recipe):
    """An autograd function of the script's own."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = cast("torch.Tensor", _Clamped.apply(self.model.body(x) + self.model.branch(x)))
        return functional.mse_loss(self.model.head(hidden), y)


class Recomputing(Recipe):
    """Activations are computed again in the backward pass."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.model.body, x, use_reentrant=False) + self.model.branch(x)
        return functional.mse_loss(self.model.head(hidden), y)


class Masked(Recipe):
    """A loss over the tokens that count: a sum with its number, which differs by sample."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:  # type: ignore[override]  # with its weight
        counts = (x[:, 1] > -0.5).double()
        return ((self.model(x) - y).flatten() ** 2 * counts).sum(), float(counts.sum())


class Penalty(Recipe):
    """A penalty on the gradient by the inputs, which needs a second backward pass."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        output = self.model(x)
        (slopes,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return ((output - y) ** 2).mean() + 0.1 * (slopes.norm(dim=1) - 1).square().mean()


class Teacher(Recipe):
    """A student that also follows the moving average of its own weights (mean teacher)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(requires_grad=False)

    def extras(self) -> dict[str, Any]:
        return {"teacher": self.teacher}

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        output = self.model(x)
        return ((output - y) ** 2).mean() + 0.5 * ((output - target) ** 2).mean()

    def after(self, _number: int) -> None:
        with torch.no_grad():
            for own, students in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                own.lerp_(students, 0.1)


class NoDecay(Recipe):
    """Weight decay for matrices only, a fused optimizer's usual two groups, and momentum that changes in the loop."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        return torch.optim.SGD(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
            ],
            lr=0.01, momentum=0.9, nesterov=True,
        )  # fmt: skip

    def before(self, epoch: int, _number: int) -> None:
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.9 if epoch == 0 else 0.8


class Tied(Recipe):
    """Two layers with one weight, and an embedding of classes of the inputs."""

    def __post_init__(self) -> None:
        self.model.branch = torch.nn.Embedding(CLASSES, 8).double()
        self.model.again = torch.nn.Linear(6, 8).double()
        self.model.again.weight = self.model.body[0].weight
        super().__post_init__()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model = self.model
        hidden = model.body(x) + torch.tanh(model.again(x)) + model.branch(classes(x[:, :1]))
        return functional.mse_loss(model.head(hidden), y)


FINER: dict[str, type[Recipe]] = {
    kind.__name__: kind
    for kind in (
        Smoothing,
        Autocast,
        Pretrained,
        Tasks,
        StraightThrough,
        Recomputing,
        Masked,
        Penalty,
        Teacher,
        NoDecay,
        Tied,
    )
}
TOLERANCES = {"Autocast": 0.02}
"""Largest relative difference: sums of micro-batches round differently in bf16."""
