"""Costs of grouping equal devices over zones: exchange inside a stage, and traffic between neighbouring stages.

Devices of one zone are alike, so a stage is described by how many of its devices each zone has.

Legend: ``Z`` zones, ``S`` sets of zones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from heterotrain_planner.layout.problem import Link
from numpy.typing import NDArray

Counts = tuple[int, ...]
"""Devices of one stage by zone."""


@dataclass(slots=True)
class ZoneCosts:
    """Seconds of stages and of pairs of stages, each worked out once.

    Attributes:
        stage_devices: devices of each stage, which is the number of members.
        exchange_s: seconds in which one device sends its part of the gradients to another one and gets it back, by
            pair of zones (``ZZ``).
        boundary_s: seconds in which one micro-batch passes from a device to another one (``ZZ``).
    """

    stage_devices: int
    exchange_s: NDArray[np.float64]
    boundary_s: NDArray[np.float64]
    _edges: dict[tuple[Counts, Counts], float] = field(default_factory=dict)
    _levels: list[float] = field(default_factory=list)
    _sets_SZ: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    _reached: list[NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        zones = len(self.boundary_s)
        self._levels = sorted(set(self.boundary_s.ravel().tolist()))
        self._sets_SZ = np.array(list(itertools.product((0, 1), repeat=zones)), dtype=np.int64)
        self._reached = [(self._sets_SZ @ (self.boundary_s <= level) > 0).astype(np.int64) for level in self._levels]

    def stage_s(self, counts: Counts) -> float:
        """Return the seconds of the exchange of one stage: its slowest device sends to all others in turn.

        Each device reduces one part of the stage's gradient, and sends it to all others (DT-FM, NeurIPS 2022).
        """
        present = [zone for zone, count in enumerate(counts) if count]
        sums = self.exchange_s @ np.array(counts, dtype=float)
        return max(float(sums[zone] - self.exchange_s[zone, zone]) for zone in present)

    def edge_s(self, one: Counts, other: Counts) -> float:
        """Return the seconds of the slowest link between two stages when their devices are paired as well as possible.

        A pairing within a level exists when no set of zones has more devices in one stage than the zones that it
        reaches within the level have in the other one (Hall's theorem). The number of zones is small.
        """
        key = (one, other) if one <= other else (other, one)
        if key not in self._edges:
            left, right = np.array(key[0]), np.array(key[1])
            wanted_S = self._sets_SZ @ left
            low, high = 0, len(self._levels) - 1
            while low < high:
                middle = (low + high) // 2
                fits = bool(np.all(wanted_S <= self._reached[middle] @ right))
                low, high = (low, middle) if fits else (middle + 1, high)
            self._edges[key] = self._levels[low]
        return self._edges[key]

    def pairs(self, one: Counts, other: Counts) -> list[tuple[int, int]]:
        """Return the zones of each pair of devices of two stages, no slower than ``edge_s``.

        Pairs inside a zone come first where the rest can still be paired.
        """
        level = self.edge_s(one, other)
        reached = self._reached[self._levels.index(level)]
        left, right = np.array(one), np.array(other)
        found: list[tuple[int, int]] = []
        zones = range(len(one))
        order = sorted(itertools.product(zones, zones), key=lambda pair: (self.boundary_s[pair], pair))
        for start, end in order:
            if self.boundary_s[start, end] > level:
                break
            while left[start] and right[end]:
                left[start] -= 1
                right[end] -= 1
                if np.any(self._sets_SZ @ left > reached @ right):
                    left[start] += 1
                    right[end] += 1
                    break
                found.append((start, end))
        return found

    def total_s(self, stages: Sequence[Counts]) -> float:
        """Return the slowest exchange of a stage and the traffic of one micro-batch through all stages, added up."""
        edges = sum(self.edge_s(one, other) for one, other in itertools.pairwise(stages))
        return max(self.stage_s(counts) for counts in stages) + edges


def zone_costs(
    names: Sequence[str],
    links: Mapping[tuple[str, str], Link],
    *,
    stage_devices: int,
    exchange_bytes: float,
    boundary_bytes: float,
) -> ZoneCosts:
    """Return the costs by zone.

    Args:
        names: of the zones.
        links: by pair of names, in either order; a pair of equal names is the link between two devices of a zone.
        stage_devices: devices of each stage.
        exchange_bytes: gradient bytes of one stage.
        boundary_bytes: of one micro-batch between two stages.
    """

    def matrix(size: float) -> NDArray[np.float64]:
        found = np.zeros((len(names), len(names)))
        for (row, one), (column, other) in itertools.product(enumerate(names), repeat=2):
            link = links.get((one, other)) or links[other, one]
            found[row, column] = link.seconds(size)
        return found

    return ZoneCosts(
        stage_devices=stage_devices,
        exchange_s=2 * matrix(exchange_bytes / stage_devices),
        boundary_s=2 * matrix(boundary_bytes),
    )
