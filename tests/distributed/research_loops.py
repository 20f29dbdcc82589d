"""Loops of research code: several losses or passes in a step, and a loss over the samples of all ranks."""

from __future__ import annotations

from typing import ClassVar

import heterotrain
import torch
from distributed.collective_scripts import contrast, towers
from distributed.ordinary_loops import SAMPLES, Recipe
from support import passes


class Adversarial(Recipe):
    """A GAN: two models and two optimizers, each with an update in every step."""

    kind: ClassVar[str] = "gan"

    def __post_init__(self) -> None:
        self.model = passes.model()
        self._both = passes.optimizers(self.model)
        super().__post_init__()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self._both[1]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self._both

    def data(self) -> torch.utils.data.TensorDataset:
        return passes.data(SAMPLES)

    def run(self, step: heterotrain.Step, optimizers: list[torch.optim.Optimizer]) -> None:
        passes.STEPS[self.kind](step, self.model, optimizers)

    def plain(self, batch: list[torch.Tensor], _number: int) -> None:
        passes.plain_step(self.kind, self.model, self._both, batch)


class SharpnessAware(Adversarial):
    """SAM: the second pass sees weights that the first one has moved."""

    kind: ClassVar[str] = "sam"


class Contrastive(Recipe):
    """A loss as for CLIP, which compares each sample with those of all ranks in the forward pass."""

    lockstep: ClassVar[bool] = True
    is_cut: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.model = towers()
        super().__post_init__()

    def run(self, step: heterotrain.Step, optimizers: list[torch.optim.Optimizer]) -> None:
        for x, _ in step.micro_batches():
            step.backward(contrast(self.model, x, step.all_gather))
        step.apply(*optimizers)

    def loss(self, x: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
        return contrast(self.model, x, lambda rows: (rows, 0))


RESEARCH: dict[str, type[Recipe]] = {kind.__name__: kind for kind in (Adversarial, SharpnessAware, Contrastive)}
