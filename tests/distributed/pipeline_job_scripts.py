"""Training scripts for jobs whose members are pipelines: the model is built by a function and cut by the plan.

``train`` runs with whole models and sharded members, too.
"""

from __future__ import annotations

import os
import time
from typing import Any

import heterotrain
import torch
from distributed.fault_injectors import FaultInjector, install_faults
from heterotrain.state import local
from torch.nn import functional as F  # noqa: N812  # the usual name

LETTERS, LENGTH, WIDTH = 13, 5, 6
RARE = 3.0
"""Samples whose first value is above it use a rare layer: one in twelve while the model learns."""


class Block(torch.nn.Module):
    """A residual block; with ``rare`` it has a layer that few samples use."""

    def __init__(self, dropout: float, *, rare: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, WIDTH + 2), torch.nn.Linear(WIDTH + 2, WIDTH)
        self.drop = torch.nn.Dropout(dropout)
        self.rare = torch.nn.Linear(WIDTH, WIDTH) if rare else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values after the block."""
        x = x + self.drop(self.outer(torch.tanh(self.inner(x))))
        if self.rare is not None and (chosen := (x[:, 0, 0] > RARE).nonzero().flatten()).numel():
            x = x.index_add(0, chosen, self.rare(x[chosen]))
        return x


class Rotating(Block):
    """A block that gets positions and a mask besides its input, and returns a tuple, as in Hugging Face models."""

    def forward(  # type: ignore[override]  # a layer with more arguments
        self, x: torch.Tensor, mask: torch.Tensor, *, turns: tuple[torch.Tensor, torch.Tensor], cache: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the values after the block, and the cache."""
        cos, sin = turns
        return torch.where(mask, super().forward(x * cos + x.roll(1, -1) * sin), x), cache


class Decoder(torch.nn.Module):
    """An embedding of letters and places, blocks, and a head that is the embedding again.

    With ``rotated`` it computes positions and a mask once, for all blocks.
    """

    def __init__(self, blocks: int, dropout: float = 0.0, *, rare: bool = False, rotated: bool = False) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(LETTERS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        kind = Rotating if rotated else Block
        self.blocks = torch.nn.ModuleList(kind(dropout, rare=rare) for _ in range(blocks))
        self.norm, self.rotated = torch.nn.LayerNorm(WIDTH), rotated

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores of the next letters."""
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        angle = torch.arange(letters.shape[1], device=letters.device, dtype=x.dtype)[:, None] / 7
        turns, mask = (angle.cos(), angle.sin()), (letters % 5 != 0)[..., None]
        for block in self.blocks:
            x = block(x, mask, turns=turns)[0] if self.rotated else block(x)
        scores: torch.Tensor = F.linear(self.norm(x), self.letters.weight)
        return scores


def text(samples: int) -> torch.utils.data.TensorDataset:
    """Return letters and their next ones."""
    rows = torch.randint(LETTERS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(rows[:, :-1], rows[:, 1:])


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the sum over all letters but every seventh kind, and their number."""
    counted = targets % 7 != 0
    return F.cross_entropy(scores[counted], targets[counted], reduction="sum"), float(counted.sum())


def measure(scores: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Return means over a batch."""
    return {"right": (scores.argmax(-1) == targets).double().mean(), "loss": F.cross_entropy(scores.mT, targets)}


def train(
    *, out: str, samples: int = 96, blocks: int = 5, fault: dict[str, Any] | None = None, micro: int | None = None,
    clip_norm: float | None = None, slow_s: float = 0.0, dropout: float = 0.0, options: dict[str, Any] | None = None,
    kind: dict[str, bool] | None = None,
) -> None:  # fmt: skip
    """Train with AdamW and a learning-rate schedule, then write this rank's part of the final weights.

    ``micro`` is the largest micro-batch of a member; ``slow_s`` lengthens each loss; ``kind`` is of the ``Decoder``.
    """
    injector = FaultInjector(fault)
    job = heterotrain.init(micro_batch_samples=micro)
    model = job.wrap(lambda: Decoder(blocks, dropout, **(kind or {})).double(), units="blocks", **(options or {}))
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.1}, {"params": []}]
    for name, p in model.named_parameters():
        groups[0 if name.endswith("weight") else 1]["params"].append(p)
    optimizer = job.optimizer(torch.optim.AdamW(groups, lr=0.02, eps=0.01))
    job.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97))
    install_faults(injector)
    found: list[dict[str, float]] = []

    @job.on_epoch_end
    def evaluate(epoch: int) -> dict[str, float]:
        injector.at("in a hook", epoch)
        values = job.evaluate(text(13), measure, batch_samples=3)
        found.append({"epoch": epoch, **values})
        return values

    number = -1

    def loss(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
        injector.at("in loss", number)
        time.sleep(slow_s)
        return loss_of(scores, targets)

    for step in job.steps(text(samples)):
        number = step.number
        with step:
            injector.at("step", step.number)
            step.compute(loss)
            injector.at("backward", step.number)
            step.apply(optimizer, clip_norm=clip_norm)
            injector.at("applied", step.number)
    own = dict(job._training.layout.named_parameters())  # a test
    parts = {name: local.local(p).clone() for name, p in own.items()}
    held = job._training.layout.holding  # a test
    places = {name: (held[name].start, held[name].stop) for name in own}
    where = f"{out}/{os.environ['HETEROTRAIN_WORKER']}-{os.environ['HETEROTRAIN_LOCAL_RANK']}.pt"
    torch.save({"parts": parts, "places": places, "found": found}, where)


def loops(*, out: str) -> None:  # every script gets the folder
    """Loop over micro-batches, which a model in stages cannot."""
    job = heterotrain.init()
    model = job.wrap(lambda: Decoder(2).double(), units="blocks")
    optimizer = job.optimizer(torch.optim.AdamW)
    for step in job.steps(text(20)):
        with step:
            for x, y in step.micro_batches():
                step.backward(*loss_of(model(x), y))
            step.apply(optimizer)
