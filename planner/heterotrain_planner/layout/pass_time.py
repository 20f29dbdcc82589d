"""Seconds of sharded training on one device: collectives of the units overlapped with their neighbours' computation.

Legend: ``U`` units, ``M`` sizes of a micro-batch from 0, ``D`` distinct terms of a sum over units.

``fully_shard`` gathers the next unit while the present one computes, and reduces a unit's gradient while the backward
pass of the unit in front of it computes. With G_u and R_u for all-gather and reduce-scatter of unit u, a pass takes

    forward    G_0 + Σ_{u<U−1} max(F_u, G_{u+1}) + F_{U−1}
    backward   Σ_u max(B_u, G_{u−1} + R_{u+1}) + R_0            (G_{−1} = R_U = 0; the last unit is still gathered)

Members of several workers gather ahead, too, but reduce a unit before the next one computes, in the memory that its
parameters leave. Their first and last unit (0 and L) are gathered before anything computes and reduced at the end,
and the unit before the last one is still gathered when its backward pass begins:

    forward    G_0 + G_L + Σ_{u<L−1} max(F_u, G_{u+1}) + F_{L−1} + F_L
    backward   B_L + Σ_{0<u<L} (R_{u+1 < L} + max(B_u, G_{u−1 > 0})) + R_1 + B_0 + R_0 + R_L

These two are what a model computes before and after its list of layers. A model that is its list (``nn.Sequential``)
has none, so its first and last unit move like the others: with such units of no bytes and no seconds around them,

    forward    G_0 + Σ_{u<L} max(F_u, G_{u+1}) + F_L
    backward   Σ_u (R_{u+1} + max(B_u, G_{u−1})) + R_0          (G_{−1} = R_{L+1} = 0)

Shards of different size make a ring wait for the largest: of n devices of which none holds more than the fraction f of
a unit of W bytes, ``G = R = (n − 1) (f W / bandwidth + latency)``. Equal shards have f = 1/n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.units import UnitSeconds
from numpy.typing import NDArray

from heterotrain_planner.layout.problem import Link, Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """The all-gather of one member; its reduce-scatter takes as long.

    Attributes:
        devices: of the member.
        link: the slowest one in the ring.
    """

    devices: int
    link: Link

    def seconds(self, unit_bytes: float, largest_ratio: float) -> float:
        """Return how long one unit takes when no device holds more than ``largest_ratio`` of it."""
        steps = self.devices - 1
        return 0.0 if not steps else steps * self.link.seconds(largest_ratio * unit_bytes)


def collectives(problem: Problem, kinds: Sequence[str]) -> Gathers:
    """Return the collectives of a member by its devices' kinds."""
    counts = Counter(kinds)
    pairs = [(one, other) for one in counts for other in counts if one < other or (one == other and counts[one] > 1)]
    links = [problem.link(*pair) for pair in pairs]
    slowest = Link(
        bytes_per_s=min((link.bytes_per_s for link in links), default=math.inf),
        latency_s=max((link.latency_s for link in links), default=0.0),
    )
    return Gathers(devices=len(kinds), link=slowest)


def gathered_bytes(problem: Problem, devices: int) -> int:
    """Return the bytes beyond its state and activations that a device needs for whole parameters and gradients.

    In each pass: a unit and the one that is gathered for next, its gradient and the one that is being reduced. Where
    gradients are reduced before the next unit computes, sums of parts arrive in the memory of the unit's parameters;
    then the first and the last unit stay, with their gradients, unless they are layers of the model's list.
    """
    sizes = [unit.parameter_bytes for unit in problem.units]
    if devices == 1:
        return 0
    if problem.reduces_late:
        stay, inner = 2 * (sizes[0] + sum(sizes[-1:] if len(sizes) > 1 else ())), sizes[1:-1]
        if problem.ends_inside:
            stay, inner = 0, sizes
        return stay + max((2 * own + before for before, own in zip([0, *inner], inner, strict=False)), default=0)
    beside = [0, *sizes, 0]
    return max(2 * own + before + after for before, own, after in zip(beside[:-2], sizes, beside[2:], strict=True))


class DeviceTimes:
    """Times of one kind of device for all sizes of a micro-batch, for any largest shard.

    Equal terms of the sums over units are added up once, so a deep model of equal blocks costs no more than a shallow
    one.

    Attributes:
        compute_M: seconds of a forward and a backward pass without any collective.
    """

    def __init__(self, problem: Problem, kind: str, most_samples: int) -> None:
        """Read the measurements of a sound problem for 0 to ``most_samples`` samples.

        Times that fall with the size are replaced by the longest time of any smaller size. A micro-batch of 0 takes as
        long as one of 1: collectives need every device, so an idle one computes a sample of weight zero.
        """
        samples_M = np.maximum(np.arange(most_samples + 1), 1)
        sizes = [unit.parameter_bytes for unit in problem.units]
        terms: Counter[tuple[bool, tuple[UnitSeconds, ...], tuple[int, ...], tuple[int, ...]]] = Counter()
        for index, unit in enumerate(problem.units):
            ahead, behind, alone = _moved(problem, index)
            terms[True, unit.seconds[kind], ahead, ()] += 1
            terms[False, unit.seconds[kind], behind, alone] += 1
        curves = {term[:2]: _curve(term[1], samples_M, forward=term[0]) for term in terms}
        self._number_D: Floats = np.array([float(number) for number in terms.values()])
        self._time_DM: Floats = np.array([curves[term[:2]] for term in terms])
        self._beside_D = [term[2] for term in terms]
        self._alone_D = [term[3] for term in terms]
        self._first_bytes = sizes[0]
        self.compute_M: Floats = self._number_D @ self._time_DM

    def overlapped_s(self, ring: Gathers, largest_ratio: float) -> Floats:
        """Return the seconds of a forward and a backward pass with their collectives, by size (``_M``)."""

        def of_each(sizes_D: Sequence[tuple[int, ...]]) -> Floats:
            return np.array([[sum(ring.seconds(size, largest_ratio) for size in sizes)] for sizes in sizes_D])

        # The first unit is gathered before anything computes, and reduced after everything has.
        ends = 2 * ring.seconds(self._first_bytes, largest_ratio)
        both = np.maximum(self._time_DM, of_each(self._beside_D)) + of_each(self._alone_D)
        total: Floats = self._number_D @ both + ends
        return total


def _moved(problem: Problem, index: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the bytes of units that move beside a unit's forward and backward pass, and while nothing computes.

    The first unit is left out, which is gathered before anything computes and reduced after everything has.
    """
    sizes = [unit.parameter_bytes for unit in problem.units]
    last = len(sizes) - 1
    after, before = tuple(sizes[index + 1 : index + 2]), tuple(sizes[max(0, index - 1) : index])
    if not problem.reduces_late:
        return after, before + after, ()
    if problem.ends_inside:
        return after, before, after
    # The last unit stays, too: it is gathered and reduced alone.
    alone = (sizes[last],) * 2 if 0 < index == last else tuple(sizes[index : index + 1] if index else ())
    ahead = after if index + 1 < last else ()
    return ahead, before if 1 < index < last else (), alone


def _curve(points: Sequence[UnitSeconds], samples_M: NDArray[np.int64], *, forward: bool) -> Floats:
    """Return seconds by size: constant up to the first point, linear between, in proportion beyond the last."""
    sizes = np.array([float(point.micro_batch_samples) for point in points])
    seconds = np.array([point.forward_s if forward else point.backward_s for point in points])
    inside = np.interp(samples_M, sizes, seconds)
    return np.maximum.accumulate(np.where(samples_M > sizes[-1], seconds[-1] * samples_M / sizes[-1], inside))
