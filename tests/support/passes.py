"""Steps with several passes over their micro-batches: a GAN and SAM, with the library and in plain torch.

Weights are random but the same everywhere, everything is in fp64, and each sample's noise is part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from heterotrain import Step
from heterotrain.data.order import permutation

RHO = 0.05
"""Length of SAM's step against the gradient's direction (Foret et al. 2021, equation 2)."""

CLIP_NORM = 1.0
"""Limit for the discriminator's gradient."""

Batch = list[torch.Tensor]
Between = Callable[[str], None]


def data(samples: int) -> torch.utils.data.TensorDataset:
    """Return (real, noise) pairs."""
    generator = torch.Generator().manual_seed(7)
    real = 1 + torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(real, torch.randn(samples, 2, generator=generator, dtype=torch.float64))


def model() -> torch.nn.ModuleDict:
    """Return a generator ``g`` and a discriminator ``d``."""
    torch.manual_seed(3)
    parts = {
        "g": torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        "d": torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    }
    return torch.nn.ModuleDict(parts).double()


def optimizers(made: torch.nn.ModuleDict) -> list[torch.optim.Optimizer]:
    """Return the optimizers of discriminator and generator, whose states tell when they took a step too many."""
    return [torch.optim.AdamW(made[name].parameters(), lr=0.01) for name in ("d", "g")]


def d_loss(made: Any, batch: Batch) -> torch.Tensor:
    """Return the discriminator's loss."""
    real, noise = batch
    return (made["d"](real) - 1).square().mean() + made["d"](made["g"](noise).detach()).square().mean()


def g_loss(made: Any, batch: Batch) -> torch.Tensor:
    """Return the generator's loss."""
    return (made["d"](made["g"](batch[1])) - 1).square().mean()


def gan_step(step: Step, made: Any, both: list[torch.optim.Optimizer], at: Between = lambda _place: None) -> None:
    """Train both models in one step; ``at`` is called with places of the step."""
    for batch in step.micro_batches(more=True):
        step.backward(d_loss(made, batch))
    at("first")
    step.apply(both[0], clip_norm=CLIP_NORM)
    at("between")
    for batch in step.micro_batches():
        step.backward(g_loss(made, batch))
        at("second")
    step.apply(both[1])


def sam_step(step: Step, made: Any, both: list[torch.optim.Optimizer], at: Between = lambda _place: None) -> None:
    """Take a step of sharpness-aware minimisation of both losses' sum."""
    for batch in step.micro_batches(more=True):
        step.backward(d_loss(made, batch) + g_loss(made, batch))
    at("first")
    moved = perturb(made)
    at("between")
    for batch in step.micro_batches():
        step.backward(d_loss(made, batch) + g_loss(made, batch))
        at("second")
    put_back(moved)
    step.apply(*both)


def perturb(made: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Move the weights by ``RHO`` along the gradient; return parameters and their moves."""
    with torch.no_grad():
        gradients = [(p, p.grad) for p in made.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for _, gradient in gradients]).norm() + 1e-12
        moved = [(p, gradient * (RHO / norm)) for p, gradient in gradients]
        for parameter, move in moved:
            parameter.add_(move)
    return moved


def put_back(moved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Undo ``perturb``."""
    with torch.no_grad():
        for parameter, move in moved:
            parameter.sub_(move)


def plain(kind: str, *, samples: int, epochs: int, batch: int) -> dict[str, torch.Tensor]:
    """Train in plain torch on whole batches and return the weights; ``kind`` is ``gan`` or ``sam``."""
    made = model()
    both = optimizers(made)
    for whole in batches(samples, epochs, batch):
        plain_step(kind, made, both, whole)
    return {name: value.detach() for name, value in made.state_dict().items()}


def plain_step(kind: str, made: Any, both: list[torch.optim.Optimizer], whole: Batch) -> None:
    """Train one step in plain torch on a whole batch."""
    made.zero_grad()
    if kind == "gan":
        d_loss(made, whole).backward()
        gradients = [p.grad for p in made["d"].parameters() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((CLIP_NORM / norm).clamp(max=1.0))
        both[0].step()
        made.zero_grad()
        g_loss(made, whole).backward()
        both[1].step()
        return
    (d_loss(made, whole) + g_loss(made, whole)).backward()
    moved = perturb(made)
    made.zero_grad()
    (d_loss(made, whole) + g_loss(made, whole)).backward()
    put_back(moved)
    for optimizer in both:
        optimizer.step()


def batches(samples: int, epochs: int, batch: int) -> Iterator[Batch]:
    """Yield the global batches of a training with seed 0."""
    tensors = data(samples).tensors
    for epoch in range(epochs):
        order = permutation(seed=0, epoch=epoch, epoch_samples=samples, shuffle=True)
        for start in range(0, samples, batch):
            yield [tensor[order[start : start + batch]] for tensor in tensors]


STEPS = {"gan": gan_step, "sam": sam_step}
