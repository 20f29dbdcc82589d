"""Training loops as people write them, for several ranks and for one process.

Each ``Recipe`` has the parts of a loop. ``train`` runs them in a worker, ``alone`` in the test's own process with plain
torch and whole batches.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import heterotrain
import torch
import torch.distributed as dist
from distributed.fault_injectors import FaultInjector, install_faults
from distributed.scripts import problem
from heterotrain.data.order import permutation
from heterotrain.data.progress import shared_seed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SAMPLES, BATCH = 96, 16
EVALUATE_STEPS = 4


class Net(torch.nn.Module):
    """A body, a branch that only some forward passes use, and a head."""

    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(features, hidden), torch.nn.Tanh())
        self.branch = torch.nn.Linear(features, hidden)
        self.head = torch.nn.Linear(hidden, 1)
        self.uses_branch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x) + self.branch(x) if self.uses_branch else self.body(x)
        result: torch.Tensor = self.head(hidden)
        return result


def a_net() -> Net:
    """Return the model in fp64, the same everywhere."""
    torch.manual_seed(3)
    return Net().double()


@dataclass
class Recipe:
    """A loop as people write it; by default a plain one with AdamW.

    ``model`` is trained by ``optimizer``.
    """

    model: Any = field(default_factory=a_net)

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)

    def extras(self) -> dict[str, Any]:
        return {}

    def plain(self, batch: list[torch.Tensor], number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(*batch).backward()
        torch.manual_seed(shared_seed(seed=0, steps=number, place="update"))  # as in a job
        self.gradients(number)
        self.optimizer.step()

    def before(self, epoch: int, number: int) -> None:
        """Run before a step."""

    def inside(self, epoch: int, number: int) -> None:
        """Run at the beginning of a step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.model(x) - y) ** 2).mean()

    def gradients(self, number: int) -> None:
        """Run when the gradients are there."""

    def after(self, number: int) -> None:
        """Run after the update."""

    def epoch_end(self, epoch: int, total: Callable[[float], float]) -> None:
        """Run after each epoch; ``total`` adds up a number over ranks."""

    def evaluate(self) -> None:
        """Run every ``EVALUATE_STEPS`` steps."""


class ThawingOnce(Recipe):
    """The body is frozen before the loop and thawed in one step, inside it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.body.requires_grad_(requires_grad=False)

    def inside(self, epoch: int, number: int) -> None:
        if epoch == 1 and number == SAMPLES // BATCH:
            self.model.body.requires_grad_()


class Groups(Recipe):
    """Progressive thawing: the body gets a parameter group of its own in the second epoch."""

    def __post_init__(self) -> None:
        self.model.body.requires_grad_(requires_grad=False)
        super().__post_init__()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)

    def before(self, epoch: int, _number: int) -> None:
        if epoch >= 1 and not self.model.body[0].weight.requires_grad:
            self.model.body.requires_grad_()
            self.optimizer.add_param_group({"params": list(self.model.body.parameters()), "lr": 0.01})


class Unused(Recipe):
    """A branch that only every third step uses."""

    def inside(self, _epoch: int, number: int) -> None:
        self.model.uses_branch = number % 3 == 1


class Clipping(Recipe):
    """Clipping and noise where every loop has them."""

    def gradients(self, _number: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(1.0 + 1e-3 * p.grad.sign())


class HeadSwap(Recipe):
    """A new head of the same size after the first epoch, in a hook, with a parameter group of its own."""

    def epoch_end(self, epoch: int, total: Callable[[float], float]) -> None:
        if epoch == 0:
            torch.manual_seed(11)
            self.model.head = torch.nn.Linear(8, 1).double()
            self.optimizer.add_param_group({"params": list(self.model.head.parameters())})
        total(1.0)


class Plateau(Recipe):
    """ReduceLROnPlateau as the message about it recommends, a counter, and an average of the weights in a hook."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5, threshold=1.0)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def extras(self) -> dict[str, Any]:
        return {"plateau": self.plateau, "average": self.average}

    def epoch_end(self, _epoch: int, total: Callable[[float], float]) -> None:
        self.average.update_parameters(self.model)
        self.plateau.step(total(1.0))


class Averaging(Recipe):
    """An exponential average of the weights, updated after each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)

    def extras(self) -> dict[str, Any]:
        return {"average": self.average}

    def after(self, _number: int) -> None:
        self.average.update_parameters(self.model)


class Evaluating(Recipe):
    """A metric every few steps that adds up its own states over ranks, and a learning rate that follows it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metric = torch.nn.Module()
        self.history = torch.zeros(1, dtype=torch.float64)
        self.metric.register_buffer("history", self.history)

    def extras(self) -> dict[str, Any]:
        return {"metric": self.metric}

    def evaluate(self) -> None:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        x, y = (column[rank::ranks] for column in problem(SAMPLES).tensors)
        with torch.no_grad():
            states = torch.stack([((self.model(x) - y) ** 2).sum(), torch.tensor(float(len(x)), dtype=torch.float64)])
        if dist.is_initialized():
            dist.all_reduce(states)
        error = states[0] / states[1]
        self.history.mul_(0.5).add_(error)
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.0 / (1.0 + 0.1 * error.item())


class Noise(Recipe):
    """Noise on the gradients, drawn on every rank."""

    def gradients(self, _number: int) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


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


class Recomputing(Recipe):
    """Activations are computed again in the backward pass."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.model.body, x, use_reentrant=False) + self.model.branch(x)
        return functional.mse_loss(self.model.head(hidden), y)


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


class Apart(Recipe):
    """One rank freezes a layer by itself, as by its own loss."""

    def before(self, _epoch: int, number: int) -> None:
        self.model.body.requires_grad_(number < 4 or os.environ["HETEROTRAIN_WORKER"] != "w1")


class ApartAlike(Recipe):
    """The same with as many parameters on every rank."""

    def before(self, _epoch: int, number: int) -> None:
        own = number < 4 or os.environ["HETEROTRAIN_WORKER"] != "w1"
        self.model.body.requires_grad_(not own)
        self.model.branch.requires_grad_(own)


RECIPES: dict[str, type[Recipe]] = {
    kind.__name__: kind
    for kind in (
        Recipe, ThawingOnce, Groups, Unused, Clipping, HeadSwap, Plateau, Averaging, Evaluating, Noise, Autocast,
        Pretrained, Recomputing, Teacher, NoDecay,
    )
}  # fmt: skip
TOLERANCES = {"Autocast": 0.02}
"""Largest relative difference: sums of micro-batches round differently in bf16."""


def train(*, out: str, recipe: str, fault: dict[str, Any] | None = None, epochs: int = 1) -> None:
    """Train by a recipe in a worker, under torchrun or alone, and write what it ends with.

    ``epochs`` counts outside a worker only, where a plan does not say it.
    """
    injector = FaultInjector(fault)
    job = heterotrain.init(epochs=epochs, batch_samples=BATCH)
    loop = (RECIPES | {"Apart": Apart, "ApartAlike": ApartAlike})[recipe]()
    model, optimizer = job.wrap(loop.model), job.optimizer(loop.optimizer)
    for name, extra in loop.extras().items():
        job.register(name, extra)
    install_faults(injector)

    @job.on_epoch_end
    def ended(epoch: int) -> None:
        def total(value: float) -> float:
            injector.at("hook", epoch)
            return job.sum(value=value if job.is_leader else 0.0)["value"]

        loop.epoch_end(epoch, total)
        injector.at("hook end", epoch)

    @job.every_steps(EVALUATE_STEPS)
    def evaluated(_steps: int) -> None:
        loop.evaluate()

    for step in job.steps(problem(SAMPLES)):
        loop.before(step.epoch, step.number)
        with step:
            injector.at("step", step.number)
            loop.inside(step.epoch, step.number)
            for x, y in step.micro_batches():
                step.backward(loop.loss(x, y))
            loop.gradients(step.number)
            step.apply(optimizer)
            loop.after(step.number)
    name = os.environ.get("HETEROTRAIN_WORKER") or f"{recipe}-{os.environ.get('RANK', 'alone')}"
    torch.save(result_of(loop), f"{out}/{name}.pt")
    assert model is loop.model


def alone(recipe: str, *, epochs: int) -> dict[str, torch.Tensor]:
    """Train by a recipe with plain torch and return what it ends with."""
    loop = RECIPES[recipe]()
    columns = problem(SAMPLES).tensors
    for number, (epoch, chosen) in enumerate(batches(epochs)):
        loop.before(epoch, number)
        loop.inside(epoch, number)
        loop.plain([column[chosen] for column in columns], number)
        loop.after(number)
        if (number + 1) % EVALUATE_STEPS == 0:
            loop.evaluate()
        if (number + 1) % (SAMPLES // BATCH) == 0:
            with torch.no_grad():
                loop.epoch_end(epoch, lambda value: value)
    return result_of(loop)


def batches(epochs: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the epoch and the samples of each step."""
    for epoch in range(epochs):
        order = permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True).tolist()
        for start in range(0, SAMPLES, BATCH):
            yield epoch, order[start : start + BATCH]


def result_of(loop: Recipe) -> dict[str, torch.Tensor]:
    """Return weights, learning rates and the state of registered objects as tensors by name."""
    found = {f"model.{name}": value.detach().clone() for name, value in loop.model.state_dict().items()}
    found["rates"] = torch.tensor([group["lr"] for group in loop.optimizer.param_groups], dtype=torch.float64)
    for name, extra in loop.extras().items():
        for key, value in extra.state_dict().items():
            if isinstance(value, torch.Tensor | int | float):
                found[f"{name}.{key}"] = torch.as_tensor(value, dtype=torch.float64).clone()
    return found
