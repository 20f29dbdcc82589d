"""The layout planner's question about a job: its model by the workers' profiles, its devices, and its limits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from heterotrain_core.units import UnitProfile, ends_inside
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem, invalid

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.links import LEAST_LATENCY_S, MeasuredLink
from heterotrain_operator.cluster_state.profiles import PoolProfile

STATE_RATIO = 4.0
"""Bytes of training state for each byte of parameters where workers report none: Adam in the parameters' format."""
_MOST_SIZES = 8
"""Each size makes the search longer."""
STEPS_OF_TWO = 4
"""Measured values are rounded to so many steps for each factor of two, up to 9 %. Smaller changes are noise, and each
change makes the planner search anew."""
_BYTES_PER_MBIT = 1e6 / 8


def problem_of(
    spec: HeteroTrainJobSpec,
    profiles: Mapping[str, PoolProfile],
    counts: Mapping[str, int],
    links: Mapping[tuple[str, str], MeasuredLink] = MappingProxyType({}),
) -> Problem | str:
    """Return the question, or in one sentence why it cannot be asked.

    Args:
        spec: the job's spec.
        profiles: by pool.
        counts: devices by pool; pools without a profile are left out.
        links: measured ones, by pair of pools in alphabetical order.
    """
    pools = [pool for pool in spec.worker_pools if pool.name in profiles]
    if not pools:
        return "no pool has a profile of the model's units"
    lengths = {pool.name: len(profiles[pool.name].units) for pool in pools}
    first = pools[0].name
    if other := next((name for name, length in lengths.items() if length != lengths[first]), None):
        return (
            f"workers of pool {first} have a model of {lengths[first]} units, and those of pool {other} one of "
            f"{lengths[other]}: every worker has to build the same model"
        )
    # Pools whose images are too old to measure it would seem faster than the others.
    knows_updates = all(profiles[pool.name].update_s_per_byte is not None for pool in pools)
    default_link, known_links = links_of(spec, lengths.keys(), links)
    by_unit = zip(*(profiles[pool.name].units for pool in pools), strict=True)
    problem = Problem(
        units=tuple(_merged(index, unit) for index, unit in enumerate(by_unit)),
        kinds=tuple(
            DeviceKind(
                name=pool.name,
                count=counts.get(pool.name, 0),
                memory_bytes=profiles[pool.name].memory_bytes,
                price_per_hour=float(pool.price_per_hour or 0),
                devices_per_node=pool.num_proc_per_worker or 1,
                update_s_per_byte=(profiles[pool.name].update_s_per_byte or 0.0) if knows_updates else 0.0,
            )
            for pool in pools
        ),
        default_link=default_link,
        links=known_links,
        state_ratio=max(profiles[pool.name].state_ratio or STATE_RATIO for pool in pools),
        batch_samples=spec.training.base_batch_samples,
        micro_batches=_micro_batches(spec, pools, profiles),
        least_members=spec.elastic_policy.min_replicas,
        may_cut=spec.parallelism.may_cut,
        may_recompute=True,
        may_shard=spec.parallelism.may_shard and all(profiles[pool.name].can_shard for pool in pools),
        reduces_late=True,
        ends_inside=ends_inside(profiles[pools[0].name].units[0].name),
    )
    if not problem.may_cut and not problem.may_shard:
        name = next(pool.name for pool in pools if not profiles[pool.name].can_shard)
        return (
            f"the workers of pool {name} cannot divide units among each other: use an elementwise optimizer of torch, "
            "such as AdamW, and an image as new as the operator, or mode Pipeline"
        )
    return invalid(problem) or problem


def fits_every_device(problem: Problem) -> bool:
    """Return whether each kind of device in use can hold the whole training state and one smallest micro-batch."""
    state = sum(unit.parameter_bytes for unit in problem.units) * problem.state_ratio
    kept = sum(unit.activation_bytes for unit in problem.units) * min(problem.micro_batches)
    return all(state + kept <= kind.memory_bytes for kind in problem.kinds if kind.count)


def _merged(index: int, units: tuple[UnitProfile, ...]) -> UnitProfile:
    """Return one unit as measured on several kinds of devices; bytes are those of the kind that needs most."""
    return UnitProfile(
        name=units[0].name or f"unit {index}",
        parameter_bytes=max(unit.parameter_bytes for unit in units),
        activation_bytes=max(unit.activation_bytes for unit in units),
        boundary_bytes=max(unit.boundary_bytes for unit in units),
        seconds={kind: points for unit in units for kind, points in unit.seconds.items()},
    )


def _micro_batches(
    spec: HeteroTrainJobSpec, pools: list[WorkerPool], profiles: Mapping[str, PoolProfile]
) -> tuple[int, ...]:
    """Return the sizes to choose from: the measured ones and twice the largest, within the limits of the spec.

    Beyond the measured sizes, times are taken to be proportional, so that still larger ones would promise nothing.
    """
    limits = [pool.micro_batch_size for pool in pools if pool.micro_batch_size is not None]
    most = min([spec.training.base_batch_samples, *limits])
    measured = {
        point.micro_batch_samples
        for pool in pools
        for unit in profiles[pool.name].units
        for points in unit.seconds.values()
        for point in points
    }
    sizes = sorted(size for size in {*measured, 2 * max(measured)} if size <= most)
    return tuple(sizes[:_MOST_SIZES]) or (most,)


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
