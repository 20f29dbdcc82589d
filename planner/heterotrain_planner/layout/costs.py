"""A problem as arrays: prefix sums of times and bytes over the possible cuts, for one size of micro-batch.

Legend: ``K`` kinds of devices, ``E`` edges (possible cuts: the front of each unit, and the end), ``C`` classes of
links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from heterotrain_core.units import UnitSeconds
from numpy.typing import NDArray

from heterotrain_planner.layout.problem import Link, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_CUTS = 64
"""Groups of units that a search may cut between. In a deeper model, neighbouring units form groups."""
MOST_CLASSES = 3
"""Classes of links that a search tells apart. Further links count as the next slower class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Times and bytes of contiguous units by differences of prefix sums.

    Attributes:
        micro_batch_samples: the size that everything is for.
        micro_batches: of a share at most; those of the whole global batch where nothing limits them.
        unit_E: index of the first unit behind each edge; the last entry is the number of units.
        forward_KE, backward_KE: seconds of all units in front of an edge.
        state_E: bytes of training state in front of an edge.
        activation_E: bytes of activations of one micro-batch in front of an edge.
        kept_E: the same where units are computed again: what enters them. Equal to ``activation_E`` where none may be.
        again_KE: seconds of the forward passes of such units in front of an edge.
        working_EE: bytes of activations of the largest such unit between two edges.
        parameter_E: bytes of parameters in front of an edge.
        memory_K: usable bytes of one device.
        class_KK: class of the link between two kinds.
        receive_CE: seconds in which one micro-batch passes an edge over a link; 0 at both ends of the model.
    """

    micro_batch_samples: int
    micro_batches: int
    unit_E: Ints
    forward_KE: Floats
    backward_KE: Floats
    state_E: Floats
    activation_E: Floats
    kept_E: Floats
    again_KE: Floats
    working_EE: Floats
    parameter_E: Floats
    memory_K: Floats
    class_KK: Ints
    receive_CE: Floats
    _known: dict[tuple[int, int], tuple[Ints, Floats]] = field(default_factory=dict, init=False, repr=False)
    """Reach and seconds of stages by kind and by the micro-batches that they keep."""

    def compute_E(self, kind: int) -> Floats:  # noqa: N802  # an array carries its shape
        """Return the seconds of forward and backward pass of all units in front of each edge."""
        total: Floats = self.forward_KE[kind] + self.backward_KE[kind]
        return total

    def kept(self, position: int) -> int:
        """Return the micro-batches whose activations a stage keeps, by its position from the end (1 for the last).

        The trainer runs at most ``position`` forward passes before the first backward pass, and no more than there are.
        """
        return min(position, self.micro_batches)

    def most_micro_batches(self, stages: Sequence[tuple[int, int, int]]) -> int:
        """Return how many micro-batches a share of these stages may have; 0 where memory permits none.

        Args:
            stages: (kind, first edge, end edge), in the order of computation.
        """
        most = self.micro_batches
        for position, (kind, edge, end) in zip(range(len(stages), 0, -1), stages, strict=True):
            room = float(self.memory_K[kind] - (self.state_E[end] - self.state_E[edge]))
            options = (
                (room, float(self.activation_E[end] - self.activation_E[edge])),
                (room - float(self.working_EE[edge, end]), float(self.kept_E[end] - self.kept_E[edge])),
            )
            if all(position * each > left for left, each in options):
                most = min(most, max(max(0, int(left // each)) if each else 0 for left, each in options))
        return most

    def ends(self, kind: int, position: int) -> Ints:
        """Return for each edge the last edge that one stage from there can reach within the kind's memory."""
        return self._stages(kind, position)[0]

    def stage_s(self, kind: int, position: int) -> Floats:
        """Return the seconds of both passes of a stage from one edge to another one, without links.

        Units are computed again where memory permits nothing else; infinite where it permits not even that.
        """
        return self._stages(kind, position)[1]

    def _stages(self, kind: int, position: int) -> tuple[Ints, Floats]:
        """Return ``ends`` and ``stage_s``."""
        key = (kind, self.kept(position))
        if key not in self._known:
            ends = self._ends(kind, position)
            compute, edge = self.compute_E(kind), np.arange(len(self.unit_E))
            again_EE = self.again_KE[kind][None] - self.again_KE[kind][:, None]
            keeps_EE = edge[None] <= self.plain_ends(kind, position)[:, None]
            seconds_EE = compute[None] - compute[:, None] + np.where(keeps_EE, 0.0, again_EE)
            possible = (edge[None] > edge[:, None]) & (edge[None] <= ends[:, None])
            self._known[key] = ends, np.where(possible, seconds_EE, np.inf)
        return self._known[key]

    def _ends(self, kind: int, position: int) -> Ints:
        plain = self.plain_ends(kind, position)
        if not self.working_EE.any():  # no unit may be computed again
            return plain
        kept_E = self.state_E + self.kept(position) * self.kept_E
        fits_EE = kept_E[None] - kept_E[:, None] + self.working_EE <= self.memory_K[kind]
        front = np.arange(len(plain))
        ends: Ints = np.maximum(plain, front + np.triu(fits_EE, 1).sum(axis=1))
        return ends

    def plain_ends(self, kind: int, position: int) -> Ints:
        """Return the same for a stage that keeps all activations."""
        bytes_E = self.state_E + self.kept(position) * self.activation_E
        ends: Ints = np.searchsorted(bytes_E, bytes_E + self.memory_K[kind], side="right") - 1
        return ends


def costs_of(problem: Problem, micro_batch_samples: int, most_micro_batches: int | None = None) -> Costs:
    """Return the arrays of a sound problem for one size of micro-batch, and at most so many of them in a share."""
    whole = -(-problem.batch_samples // micro_batch_samples)
    classes, class_KK = link_classes(problem)
    forward_KU = np.array(
        [[seconds_at(u.seconds[k.name], micro_batch_samples)[0] for u in problem.units] for k in problem.kinds]
    )
    backward_KU = np.array(
        [[seconds_at(u.seconds[k.name], micro_batch_samples)[1] for u in problem.units] for k in problem.kinds]
    )
    unit_E = _edges(problem)
    boundary = [float(problem.units[unit - 1].boundary_bytes) for unit in unit_E[1:-1].tolist()]
    receive_CE = np.zeros((len(classes), len(unit_E)))
    for index, link in enumerate(classes):
        receive_CE[index, 1:-1] = [link.seconds(micro_batch_samples * size) for size in boundary]
    parameter = np.array([float(unit.parameter_bytes) for unit in problem.units])
    activation = np.array([float(unit.activation_bytes) for unit in problem.units]) * micro_batch_samples
    kept, again = activation.copy(), np.zeros(len(activation), dtype=bool)
    if problem.may_recompute:
        kept[1:-1] = [float(unit.boundary_bytes) * micro_batch_samples for unit in problem.units[: len(kept) - 2]]
        again[1:-1] = True
    return Costs(
        micro_batch_samples=micro_batch_samples,
        micro_batches=whole if most_micro_batches is None else min(most_micro_batches, whole),
        unit_E=unit_E,
        forward_KE=_prefix(forward_KU)[:, unit_E],
        backward_KE=_prefix(backward_KU)[:, unit_E],
        state_E=_prefix(parameter * problem.state_ratio)[unit_E],
        activation_E=_prefix(activation)[unit_E],
        kept_E=_prefix(kept)[unit_E],
        again_KE=_prefix(forward_KU * again)[:, unit_E],
        working_EE=_largest(np.maximum.reduceat(activation * again, unit_E[:-1])),
        parameter_E=_prefix(parameter)[unit_E],
        memory_K=np.array([float(kind.memory_bytes) for kind in problem.kinds]),
        class_KK=class_KK,
        receive_CE=receive_CE,
    )


def link_classes(problem: Problem) -> tuple[tuple[Link, ...], Ints]:
    """Return the different links, fastest first, and the class of each pair of kinds.

    Where there are more than ``MOST_CLASSES``, each class takes the worst of its links: times are never too short.
    """
    names = [kind.name for kind in problem.kinds]
    links = [[problem.link(one, other) for other in names] for one in names]
    typical = float(np.mean([unit.boundary_bytes for unit in problem.units])) * max(problem.micro_batches)
    order = sorted({link for row in links for link in row}, key=lambda link: (link.seconds(typical), link.latency_s))
    groups = [[link] for link in order]
    while len(groups) > MOST_CLASSES:
        # Join the two neighbours whose times differ least, as a ratio.
        times = [math.log(max(group[-1].seconds(typical), 1e-300)) for group in groups]
        nearest = min(range(len(groups) - 1), key=lambda i: times[i + 1] - times[i])
        groups[nearest : nearest + 2] = [groups[nearest] + groups[nearest + 1]]
    number = {link: index for index, group in enumerate(groups) for link in group}
    worst = tuple(
        Link(bytes_per_s=min(x.bytes_per_s for x in group), latency_s=max(x.latency_s for x in group))
        for group in groups
    )
    return worst, np.array([[number[link] for link in row] for row in links], dtype=np.int64)


def _edges(problem: Problem) -> Ints:
    """Return the possible cuts: in front of every unit, or of groups of about equal time where there are too many."""
    size = len(problem.units)
    if size <= MOST_CUTS:
        return np.arange(size + 1)
    largest = max(problem.micro_batches)
    weight = np.array(
        [sum(sum(seconds_at(points, largest)) for points in unit.seconds.values()) for unit in problem.units],
        dtype=float,
    )
    done = _prefix(weight) / weight.sum()
    inner = np.unique(np.searchsorted(done, np.arange(1, MOST_CUTS) / MOST_CUTS).clip(1, size - 1))
    return np.concatenate([[0], inner, [size]]).astype(np.int64)


def seconds_at(points: Sequence[UnitSeconds], samples: int) -> tuple[float, float]:
    """Return forward and backward seconds of a micro-batch: linear between points, in proportion beyond the last."""
    sizes = [point.micro_batch_samples for point in points]
    last = points[-1]
    if samples >= last.micro_batch_samples:
        ratio = samples / last.micro_batch_samples
        return last.forward_s * ratio, last.backward_s * ratio
    forward = float(np.interp(samples, sizes, [point.forward_s for point in points]))
    return forward, float(np.interp(samples, sizes, [point.backward_s for point in points]))


def _largest(values: Floats) -> Floats:
    """Return the largest of the values between two edges; 0 where there are none."""
    size = len(values)
    found: Floats = np.zeros((size + 1, size + 1))
    for edge in range(size):
        found[edge, edge + 1 :] = np.maximum.accumulate(values[edge:])
    return found


def _prefix(values: Floats) -> Floats:
    """Return sums of the first 0, 1, 2, … values along the last axis."""
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)
