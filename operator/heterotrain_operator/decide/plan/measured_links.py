"""Links between pools for the layout planner: as measured where members used them, else as the spec states them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from heterotrain_planner.layout.problem import Link

from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.links import LEAST_LATENCY_S, MeasuredLink

STEPS_OF_TWO = 4
"""Measured values are rounded to so many steps for each factor of two, up to 9 %. Smaller changes are noise, and each
change makes the planner search anew."""
_BYTES_PER_MBIT = 1e6 / 8


def links_of(
    spec: HeteroTrainJobSpec, pools: Collection[str], measured: Mapping[tuple[str, str], MeasuredLink]
) -> tuple[Link, dict[tuple[str, str], Link]]:
    """Return the link between pools of which nothing is known, and the known ones by pair.

    Args:
        spec: the job's spec, with stated bandwidths.
        pools: those that the planner knows; links of others are left out.
        measured: by pair of pools in alphabetical order.
    """
    found: dict[tuple[str, str], Link] = {}
    for stated in spec.parallelism.links:
        one, other = stated.between
        if {one, other} <= set(pools):
            found[min(one, other), max(one, other)] = Link(bytes_per_s=stated.mbit_per_second * _BYTES_PER_MBIT)
    for pair, link in measured.items():
        if set(pair) <= set(pools):
            latency_s = _rounded(link.latency_s) if link.latency_s >= LEAST_LATENCY_S else 0.0
            found[pair] = Link(bytes_per_s=_rounded(link.bytes_per_s), latency_s=latency_s)
    return Link(bytes_per_s=spec.parallelism.link_mbit_per_second * _BYTES_PER_MBIT), found


def _rounded(value: float) -> float:
    return float(2.0 ** (round(math.log2(value) * STEPS_OF_TWO) / STEPS_OF_TWO))
