"""The order of an epoch's samples, computed position by position: any part of it costs the same, whatever its length.

The order is a keyed bijection on ``[0, count)``, a format-preserving cipher: a Feistel network whose two halves are
the digits of the position in the mixed radix ``(a, b)``, with cycle walking where ``a·b`` exceeds ``count``. Source of
the construction: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5. The
round function is SplitMix64's finaliser (G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014) of key plus digit. It mixes well and is not meant to keep secrets.

Properties: each sample once (each round can be inverted, whatever its function); no table; whole-number arithmetic
only, so it is the same on every machine and in every version of numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isqrt

import numpy as np
import numpy.typing as npt

ALGORITHM = "feistel-splitmix64-12"
"""Name of the order in checkpoints: another algorithm needs another name."""
UNSHUFFLED = "as in the data set"
ROUNDS = 12
"""Twice the six rounds after which Feistel networks with random functions are hard to tell from random permutations (J.
Patarin, CRYPTO 2003), because domains are small here and round functions are not random."""
BLOCK = 4096
"""Positions computed together: calls for single micro-batches would spend their time in numpy's overhead."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Bijection:
    """A keyed permutation of ``[0, count)``.

    Attributes:
        count: number of elements, from 1 to below 2^62.
        keys: one number from 0 to below 2^64 for each round.
    """

    count: int
    keys: tuple[int, ...]

    @staticmethod
    def of(*key: object, count: int) -> Bijection:
        """Return the permutation for a key: any values with a text of their own."""
        text = " ".join(map(str, key))
        digests = (blake2b(f"{text} round {number}".encode(), digest_size=8).digest() for number in range(ROUNDS))
        return Bijection(count, tuple(int.from_bytes(digest, "little") for digest in digests))

    def at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the elements at positions ``[start, stop)``, of shape (stop - start,)."""
        found = self._encipher(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(found >= self.count)
        while outside.size:  # a cycle leads back into the range, because it began there
            found[outside] = self._encipher(found[outside])
            outside = outside[found[outside] >= self.count]
        return found.astype(np.int64)

    def _encipher(self, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        a = isqrt(self.count - 1) + 1
        a += a % 2  # rotations by an odd number are odd permutations only where the radix is even
        b = -(-self.count // a)
        radix = np.uint64(a), np.uint64(b)
        digits = [positions // radix[1], positions % radix[1]]
        for number, key in enumerate(self.keys):
            changed, other = number % 2, 1 - number % 2
            digits[changed] = (digits[changed] + _mixed(key, digits[other]) % radix[changed]) % radix[changed]
        return digits[0] * radix[1] + digits[1]


def _mixed(key: int, digits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's finaliser of ``key + (digit + 1)·golden``, modulo 2^64."""
    mixed = (digits + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key)
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(
    *, seed: int, epoch: int | str, epoch_samples: int, shuffle: bool, start: int = 0, stop: int | None = None
) -> npt.NDArray[np.int64]:
    """Return positions ``[start, stop)`` of one epoch's order; the same on every rank and every machine.

    Args:
        seed: the job's seed, at least 0.
        epoch: from 0, or the name of another sequence of the same seed.
        epoch_samples: samples of the data set.
        shuffle: whether to draw an order instead of keeping that of the data set.
        start: first position.
        stop: the position after the last one; ``None`` for the end of the epoch.

    Returns:
        Indices into the data set, of shape (stop - start,); over the whole epoch each index comes once.
    """
    stop = epoch_samples if stop is None else stop
    if not shuffle or stop <= start:
        return np.arange(start, stop, dtype=np.int64)
    return shuffled((seed, epoch), epoch_samples, start, stop)


def shuffled(key: tuple[object, ...], count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return positions ``[start, stop)`` of the order of ``count`` elements that belongs to ``key``."""
    number = start // BLOCK
    first, whole = number * BLOCK, _block(key, count, number)
    if stop > first + BLOCK:
        whole = np.concatenate([whole, *(_block(key, count, more) for more in range(number + 1, -(-stop // BLOCK)))])
    return whole[start - first : stop - first].copy()  # blocks are shared and read-only


def order_name(*, seed: int, shuffle: bool, samples: int) -> str:
    """Return the text by which a checkpoint names an order; more samples at the end of an unshuffled one keep it."""
    return f"{ALGORITHM} with seed {seed} of {samples} samples" if shuffle else UNSHUFFLED


@lru_cache(maxsize=64)
def _block(key: tuple[object, ...], count: int, number: int) -> npt.NDArray[np.int64]:
    found = Bijection.of(*key, count=count).at(number * BLOCK, min(count, (number + 1) * BLOCK))
    found.setflags(write=False)
    return found
