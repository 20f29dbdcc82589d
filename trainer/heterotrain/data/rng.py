"""Random numbers of data sets: drawn from generators that depend on seed and place alone, beside those of the training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_SPARE = np.random.MT19937(0)
"""Takes the place of numpy's generator while samples are read: made once, because that takes longer than seeding it."""


@dataclass(frozen=True, slots=True)
class RngStates:
    """The generators that data sets draw from without being asked to: torch's, Python's and numpy's global ones."""

    torch: torch.Tensor
    python: Any
    numpy: Any

    @staticmethod
    def current() -> RngStates:
        """Return them as they are."""
        # numpy's is exchanged, not copied: reading its state and writing it back takes longer than a small step's samples
        return RngStates(torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator())

    def restore(self) -> None:
        """Let everybody draw on from here."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)


@contextmanager
def seeded_rng(seed: int, numpys: np.random.MT19937 = _SPARE) -> Iterator[None]:
    """Seed the global generators of the CPU for a while; afterwards they are as they were.

    Args:
        seed: from 0 to below 2^63; numpy's generator takes its lowest 32 bits.
        numpys: takes the place of numpy's generator meanwhile, for those who want to go on with it later.
    """
    before = RngStates.current()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    mtrand.set_bit_generator(numpys)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what data sets draw from without being asked to
    try:
        yield
    finally:
        before.restore()
