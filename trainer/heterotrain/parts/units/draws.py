"""Random numbers of a model's units in ``step.compute``: by seed, step, unit, and place of the samples in the step.

A unit begins with a generator of its own seed for each micro-batch. So a repeated step draws the same numbers, and so
does another cut of the units, or another share that has a micro-batch of the same samples. A micro-batch that begins
at the same sample and has another size draws other numbers for its later samples: torch draws for all samples at once.
Accelerators of different kinds draw different numbers from one seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from heterotrain.parts.units.units import Units


def seed_of(*place: object) -> int:
    """Return a seed from 0 to below 2^63; different places have independent ones."""
    text = "/".join(str(part) for part in place)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of an accelerator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class UnitDraws:
    """Seeds a model's units; does nothing outside of ``at``."""

    def __init__(self, units: Units, *, seed: int, device: torch.device) -> None:
        """Hook into the model, which must not be cut afterwards."""
        self._seed = seed
        self._device = device
        self._place: tuple[int, int] | None = None
        for index, layer in enumerate(units.layers):
            layer.register_forward_pre_hook(self._entering(index + units.first_layer))
        if units.path:
            units.model.register_forward_pre_hook(self._entering(0))
            units.layers[-1].register_forward_hook(self._entering(len(units.names) - 1))

    @contextmanager
    def at(self, step: int, start: int) -> Iterator[None]:
        """Seed the units in the block.

        Args:
            step: number of the step.
            start: samples of the step before the micro-batch's first one.
        """
        self._place = step, start
        try:
            yield
        finally:
            self._place = None

    def _entering(self, unit: int) -> Any:
        def hook(*_: object) -> None:
            if self._place is not None:
                step, start = self._place
                seed_torch(seed_of(self._seed, "draws", step, unit, start), self._device)

        return hook
