"""Finds losses that are means over something else than samples: targets that count, weights of classes, masks.

A mean is weighted by its micro-batch's samples. Where its denominator is another number, which differs by batch, the
gradient is not that of one process with the whole batch. Autograd's graph has the denominators: a loss counts as such a
mean once two micro-batches of one size have had different ones. It matters where parts of one step differ, on one rank
or on two. Means in compiled code are not found, nor those that are divided by what needs a gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)

LOOKS = 8
"""Micro-batches that are looked at."""
_SHAPED = ("ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0")
SAME = ("NegBackward0", "ToCopyBackward0", "CloneBackward0", *_SHAPED)
"""Operations that change neither a sum nor a mean but its sign."""
ADDED = ("AddBackward0", "SubBackward0", "RsubBackward1")
UNEVEN = -1.0
MOST_NODES = 1000
"""Of a loss whose means are looked for."""
_MEAN = 1
"""Torch's number of ``reduction="mean"``."""


class UnevenMeans:
    """What this rank has seen of the denominators of its loss.

    Attributes:
        code: for the vote on the step that was looked at last: ``UNEVEN``, or another number below it that is the same
            for micro-batches that fit together; 0 if nothing is known.
    """

    def __init__(self) -> None:
        self.code = 0.0
        self.step = -1
        self._looks = 0
        self._is_told = False
        self._of_size: dict[int, tuple[tuple[float, float], ...]] = {}
        self._varying: set[int] = set()
        self._of_step: list[tuple[int, tuple[tuple[float, float], ...]]] = []

    def look(self, loss: torch.Tensor, samples: int, *, step: int) -> bool:
        """Look at the loss of a micro-batch, before its backward pass; return whether to look at another one."""
        found, self._looks = denominators(loss), self._looks + 1
        if self.step != step:
            self.code, self.step = 0.0, step
            self._of_step.clear()
        earlier = self._of_size.setdefault(samples, found)
        if not found or len(earlier) != len(found) or self._is_told:
            return False
        self._of_step.append((samples, found))
        # Where factors make up for other numbers of targets, the loss is divided by the same number again.
        pairs = enumerate(zip(found, earlier, strict=True))
        self._varying |= {term for term, pair in pairs if not any(map(_are_alike, zip(*pair, strict=True)))}
        ratios = [[own[term][0] / size for size, own in self._of_step] for term in sorted(self._varying)]
        if not all(_are_alike(each) for each in ratios):
            self.code = UNEVEN
        elif ratios:
            self.code = UNEVEN - 1.0 - math.fsum(each[0] for each in ratios)
        return self._looks < LOOKS

    def hear(self, codes: Sequence[float], *, step: int, tells: bool) -> None:
        """Take the codes of all ranks; say once, on the rank that ``tells``, that parts of a step do not fit together.

        The code of a rank that does not know yet says nothing.
        """
        known = [code for code in codes if code < 0]
        if self._is_told or not (UNEVEN in known or not _are_alike(known)):
            return
        self._is_told = True
        if tells:
            _log.warning(
                "step %d: the loss is a mean over something else than samples (targets that count, weights of classes, "
                "a mask), of which micro-batches have different numbers. They count by samples, so gradients depend on "
                "shares, and are not those of one process: call step.backward(loss_sum, weight=denominator), with the "
                'sum and the number that divides it, as cross_entropy(…, reduction="sum") and (targets != -100).sum()',
                step,
            )


def denominators(loss: torch.Tensor) -> tuple[tuple[float, float], ...]:
    """Return what the means are divided by that a loss is a sum of, each also over its factors; empty if unknown."""
    try:
        return () if loss.grad_fn is None else tuple(_found(loss.grad_fn))
    except Exception:  # noqa: BLE001  # other versions of torch, and functions and hooks of scripts, may raise anything
        return ()


def _found(node: Any) -> Iterator[tuple[float, float]]:
    """Walk from a loss to its means, past factors and through added terms."""
    rest, seen = [(node, 1.0)], set()
    while rest:
        node, divisor = rest.pop()
        if node in seen:  # more ways than nodes lead through a recurrence
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            raise RuntimeError
        name, inputs = node.name(), [each for each, _ in node.next_functions if each is not None]
        if name in (*SAME, *ADDED, "MulBackward1"):
            rest += [(each, divisor) for each in reversed(inputs)]
        elif name == "MeanBackward0":
            yield (own := float(node._saved_self_sym_numel)), own * divisor  # noqa: SLF001  # torch's name
        elif getattr(node, "_saved_reduction", None) == _MEAN:
            counted = getattr(node, "_saved_total_weight", None)
            own = float(node._saved_self.numel() if counted is None else counted)  # noqa: SLF001  # torch's name
            yield own, own * divisor
        elif name in ("MulBackward0", "DivBackward0") and len(inputs) == 1:
            other = node._saved_self if node.next_functions[0][0] is None else node._saved_other  # noqa: SLF001  # torch's name
            if other.numel() == 1 and name == "DivBackward0" and _is_sum(inputs[0]):
                yield (own := float(other)), own * divisor
            elif other.numel() == 1:
                value = float(other)
                rest.append((inputs[0], divisor * value if name == "DivBackward0" else divisor / (value or math.nan)))


def _is_sum(node: Any) -> bool:
    while node is not None and node.name() in SAME:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "SumBackward0"


def _are_alike(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= 1e-6 * max(map(abs, values))
