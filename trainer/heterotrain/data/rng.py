"""Random numbers for data sets: seeded by job seed and position only, and separate from those of the training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

SEEDS = 2**63
"""Seeds are below this number."""
_SPARE = np.random.MT19937(0)
"""Replaces numpy's global generator while samples are read; made once, because making one is slower than seeding it."""
_PYTHONS: Any = random.seed.__self__  # type: ignore[attr-defined]  # a method of Python's global generator
_seed_pythons = super(random.Random, _PYTHONS).seed
"""What ``random.seed`` does with a number, after it has looked for other types."""


@dataclass(frozen=True, slots=True)
class RngStates:
    """States of the global generators of torch, Python and numpy, from which data sets may draw implicitly."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @staticmethod
    def current() -> RngStates:
        """Return the present states."""
        # numpy's generator is swapped, not copied: copying its state takes longer than reading a small step's samples
        return RngStates(torch.default_generator.get_state(), random.getstate(), mtrand.get_bit_generator())

    def restore(self) -> None:
        """Restore these states."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)


class seeded_rng:  # noqa: N801  # read as a function, and half as many calls as a generator in each step
    """Seed the CPU's global generators inside the ``with`` block; restore their states afterwards."""

    def __init__(self, seed: int, numpys: np.random.MT19937 = _SPARE) -> None:
        """Take a seed below 2^63, and what replaces numpy's generator inside the block, to continue with it later."""
        self._seed, self._numpys = seed, numpys

    def __enter__(self) -> None:
        self._before = RngStates.current()
        mtrand.set_bit_generator(self._numpys)
        reseed(self._seed)

    def __exit__(self, *_: object) -> None:
        self._before.restore()


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of torch, for the CPU and a CUDA device, of Python, and of numpy.

    ``torch.manual_seed`` also seeds absent kinds of devices and records the caller's stack for each of them, which
    takes a tenth of a millisecond per step.

    Args:
        seed: from 0 to below 2^63.
        device: that of the model; ``None`` for the CPU.
    """
    torch.default_generator.manual_seed(seed)
    _seed_pythons(seed)
    _PYTHONS.gauss_next = None
    np.random.seed(seed % 2**32)  # noqa: NPY002  # scripts and data sets draw from this global generator
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)
