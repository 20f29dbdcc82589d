"""Compares ranks' copies of the state by their fingerprints, and chooses the copy that the others should take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """Copies that differ.

    Attributes:
        donor: the lowest rank with the copy that is nearest to all others; on devices of one kind, the most common one.
        others: the ranks whose copies differ from the donor's.
    """

    donor: int
    others: tuple[int, ...]


def compare(fingerprints: Sequence[float], *, tolerance: float) -> Difference | None:
    """Return how the copies differ; ``None`` if they do not, or if a rank does not know its fingerprint.

    Args:
        fingerprints: by rank; NaN where unknown, infinite where a value is not finite.
        tolerance: largest difference of equal copies; 0 for checksums.
    """
    if any(map(math.isnan, fingerprints)):
        return None
    if all(_distance(fingerprints[0], each) <= tolerance for each in fingerprints):
        return None
    strangers = [sum(_distance(own, other) > tolerance for other in fingerprints) for own in fingerprints]
    donor = strangers.index(min(strangers))
    others = [rank for rank, own in enumerate(fingerprints) if _distance(own, fingerprints[donor]) > tolerance]
    return Difference(donor, tuple(others)) if others else None


def describe(difference: Difference, *, step: int, workers: Sequence[str], names: Sequence[str]) -> str:
    """Return one sentence on what differs and where.

    Args:
        difference: the copies that differ.
        step: number of the step after which they were compared.
        workers: the worker of each rank.
        names: the tensors that differ, or a range of them.
    """
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    others = ", ".join(f"rank {rank} ({workers[rank]})" for rank in difference.others[:8])
    more = f" and {len(difference.others) - 8} more" if difference.others[8:] else ""
    agreeing = len(workers) - len(difference.others)
    which = f"whose copy {agreeing} of {len(workers)} ranks have" if agreeing > 1 else "and no copy is more common"
    return (
        f"the training state differs between ranks after step {step}: {others}{more} against rank {difference.donor} "
        f"({workers[difference.donor]}), {which}, in {shown}"
    )


REMEDY = (
    "Look for code that changes weights, gradients, or optimizers on some ranks only, such as hooks, layers frozen or "
    "replaced during training, gradients changed outside step.apply, or buffers changed between steps (those that may "
    "differ: job.buffers(name, 'own')); then for bad memory in the named machines"
)


def _distance(one: float, other: float) -> float:
    if one == other:  # also for infinities, whose difference is NaN
        return 0.0
    return abs(one - other)
