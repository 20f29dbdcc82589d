"""Finds losses that are sums over samples although they were given without a weight.

A mean is weighted by the micro-batch's samples. A sum would be, too: its gradient would follow shares and micro-batch
sizes. Autograd's graph says how a loss was made. If it ends in a sum of as many numbers for each sample, without a
divisor that follows the batch, and that is so for micro-batches of two sizes, on one rank or on two, the loss grows
with its micro-batch.

Only the first micro-batches of a size are looked at. Sums in compiled code, and sums over products with masks, are not
found. Means are looked at by ``uneven_mean.py``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heterotrain.errors import UsageError
from heterotrain.steps.uneven_mean import ADDED, MOST_NODES, SAME, UnevenMeans

LOOKS = 2
"""Micro-batches of one size that are looked at."""
DIVIDED = 4
"""Observations of a sum with a divisor, because two batches may have as many tokens by chance."""
SIZE_BITS = 22
_SUMMED = 2
"""Torch's number of ``reduction="sum"``."""


@dataclass(frozen=True, slots=True)
class SampleSum:
    """A sum that a loss is made of.

    Attributes:
        numbers: how many are added up for each sample.
        factor: what the sum is multiplied by.
        is_ragged: whether this number may differ by batch, as lengths of texts do.
    """

    numbers: float
    factor: float
    is_ragged: bool


class SummedLosses:
    """What this rank has seen of the losses that have no weight.

    Attributes:
        looks: whether it is still open what they are.
        seen: sizes of micro-batches that need not be looked at any more.
        code: for the vote: the kind of sum and the size of its micro-batch; 0 if none is known.
        means: what it has seen of those that are no sums.
    """

    def __init__(self) -> None:
        self.looks = True
        self.seen = {0}
        self.code = 0.0
        self.means = UnevenMeans()
        self._may_be_sum = self._looks_at_means = True
        self._found: SampleSum | None = None
        self._counts: dict[int, int] = {}

    def code_of(self, step: int) -> float:
        """Return what this rank says of the loss in the vote on a step."""
        return (self.means.code if self.means.step == step else 0.0) or self.code

    def look(self, loss: torch.Tensor, samples: int, *, step: int, is_only: bool = True) -> None:
        """Look at the loss of a micro-batch, before its backward pass; ``is_only``: the step has one pass.

        Raises:
            UsageError: it grows with the micro-batch.
        """
        self._looks_at_means = self._looks_at_means and is_only and self.means.look(loss, samples, step=step)
        found = sample_sum(loss, samples) if self._may_be_sum else None
        if found is None or (self._found is not None and not _is_same(found, self._found)):
            self._may_be_sum, self.looks, self.code = False, self._looks_at_means, 0.0
            return
        self._found = found
        self._counts[samples] = self._counts.get(samples, 0) + 1
        if self._counts[samples] >= LOOKS and not self._looks_at_means:
            self.seen.add(samples)
        enough = len(self._counts) > 1 and (found.factor == 1.0 or sum(self._counts.values()) >= DIVIDED)
        if enough:
            raise UsageError(_sentence(step, sorted(self._counts)))
        if found.factor == 1.0 or self._counts[samples] >= LOOKS:
            numbers = "any" if found.factor == 1.0 and found.is_ragged else f"{found.numbers:.9g}"
            kind = zlib.crc32(f"{numbers} {found.factor:.9g}".encode()) >> 2
            self.code = float(((kind + 1) << SIZE_BITS) + min(samples, (1 << SIZE_BITS) - 1))


def check_alike(codes: Sequence[float], *, step: int) -> None:
    """Check the codes of all ranks, which have micro-batches of different sizes.

    Raises:
        UsageError: the same kind of sum has different sizes.
    """
    known = [int(code) for code in codes if code > 0]
    sizes = {code & ((1 << SIZE_BITS) - 1) for code in known}
    if len(sizes) > 1 and len({code >> SIZE_BITS for code in known}) == 1:
        raise UsageError(_sentence(step, sorted(sizes)))


def sample_sum(loss: torch.Tensor, samples: int) -> SampleSum | None:
    """Return the sum over samples that a loss is made of; ``None`` if it has none, or another divisor is possible."""
    try:
        return None if loss.grad_fn is None else _find(loss.grad_fn, samples)
    except Exception:  # noqa: BLE001  # as in ``denominators``
        return None


def _find(node: Any, samples: int) -> SampleSum | None:
    """Walk from a loss to its first sum, past factors and through added terms."""
    rest, seen, found = [(node, 1.0)], {None}, None
    while rest and found is None and len(seen) <= MOST_NODES:
        node, factor = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        name, inputs = node.name(), [each for each, _ in node.next_functions]
        if name in SAME or name in ADDED:
            rest += [(each, factor) for each in reversed(inputs)]
        elif name in ("MulBackward0", "DivBackward0"):
            other = _other(node, inputs)
            if other is not None and other.numel() == 1:
                known = next(each for each in inputs if each is not None)
                rest.append((known, _times(name, factor, float(other))))
        elif name == "SumBackward0":
            found = _of(tuple(node._saved_self_sym_sizes), samples, _inside(inputs[0], factor))  # noqa: SLF001  # torch's name
        elif getattr(node, "_saved_reduction", None) == _SUMMED:
            found = _of(tuple(node._saved_self.shape), samples, factor)  # noqa: SLF001  # torch's name
    return found


def _inside(node: Any, factor: float) -> float | None:
    """Return the factor of a sum with those of its terms; ``None`` where they may depend on all terms."""
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        inputs = [each for each, _ in node.next_functions]
        other = _other(node, inputs)
        if other is None:
            is_square = node.name() == "MulBackward0" and node._saved_self is node._saved_other  # noqa: SLF001  # torch's name
            return factor if is_square else None
        factor = _times(node.name(), factor, float(other.double().mean()))
        node = next(each for each in inputs if each is not None)
    return factor


def _other(node: Any, inputs: Sequence[Any]) -> torch.Tensor | None:
    """Return the operand that needs no gradient; ``None`` if both do."""
    if None not in inputs:
        return None
    other: torch.Tensor = node._saved_other if inputs[0] is not None else node._saved_self  # noqa: SLF001  # torch's name
    return other


def _times(name: str, factor: float, value: float) -> float:
    return factor * value if name == "MulBackward0" else factor / value if value else math.nan


def _of(sizes: tuple[int, ...], samples: int, factor: float | None) -> SampleSum | None:
    if not factor or not math.isfinite(factor) or not sizes or sizes[0] % samples:
        return None
    return SampleSum(math.prod(sizes) / samples, factor, is_ragged=sizes[0] == samples and len(sizes) > 1)


def _is_same(one: SampleSum, other: SampleSum) -> bool:
    """Return whether two micro-batches have the same kind of sum; without a divisor, texts may have other lengths."""
    if one.factor == other.factor == 1.0 and one.is_ragged and other.is_ragged:
        return True
    return math.isclose(one.factor, other.factor, rel_tol=1e-9) and one.numbers == other.numbers


def _sentence(step: int, sizes: Sequence[int]) -> str:
    return (
        f"step {step}: the loss is a sum over samples, so it grows with its micro-batch, and gradients would depend on "
        f"shares (micro-batches of {sizes[0]} and {sizes[-1]} samples): call step.backward(loss, weight=len(x)), with "
        "the number of samples or tokens in the sum, or give the mean"
    )
