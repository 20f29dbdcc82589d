"""One rank's profile of the model's units, from Prometheus. Pure.

These series are many, up to 4608 for a rank, and they never change. So they are read once for each pool, by a query of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from heterotrain_core.contract import metrics
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.problem import MOST_SECONDS
from heterotrain_planner.perf.counters import MOST_SAMPLES

from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId
from heterotrain_operator.prom.accepted import MOST_BYTES, member_of, number

if TYPE_CHECKING:
    from heterotrain_operator.prom.vector import VectorSample

_NAMES = (metrics.UNIT_SECONDS, metrics.UNIT_BYTES)
_NAME = re.compile(r"[\w.]+( [\w.]+)*", re.ASCII)
"""Paths in a model, and "before blocks". Older images export none."""
_PHASES = (metrics.PHASE_FORWARD, metrics.PHASE_BACKWARD)


def profile_of(job_uid: str, member: MemberId) -> str:
    """Return the query for a rank's profile; the uids have to be those of Kubernetes."""
    names = "|".join(_NAMES)
    rank = f'{metrics.LABEL_WORKER_UID}="{member.worker_uid}",{metrics.LABEL_LOCAL_RANK}="{member.local_rank}"'
    return f'{{__name__=~"{names}",{metrics.LABEL_JOB_UID}="{job_uid}",{rank}}}'


def parse_profile(
    rows: Iterable[VectorSample],
    member: MemberId,
    gauges: MemberGauges,
    *,
    pool: str,
    workers: Mapping[str, str],
    namespace: str,
) -> PoolProfile | str:
    """Return a rank's profile, or in a clause why it cannot be used.

    Args:
        rows: the answer.
        member: the rank.
        gauges: its number of units and its memory.
        pool: name of its pool.
        workers: as in ``accepted_rows``.
        namespace: as in ``accepted_rows``.
    """
    units, memory_bytes = gauges.units, gauges.usable_memory_bytes
    if units is None or memory_bytes is None:
        return "it has no number of units or no usable memory"
    seconds: dict[tuple[int, int, str], float] = {}
    sizes: dict[tuple[int, str], float] = {}
    names: dict[int, str] = {}
    for labels, value in rows:
        name = labels.get("__name__", "")
        if name not in _NAMES or member_of(labels, workers, namespace) != member:
            continue
        unit = number(labels.get(metrics.LABEL_UNIT, ""), units - 1)
        if unit is None:
            return f"it has a unit beyond the {units} that it counts"
        # A duplicate is of the same process, scraped twice.
        if name == metrics.UNIT_BYTES and 0 <= value <= MOST_BYTES:
            sizes.setdefault((unit, labels.get(metrics.LABEL_WHAT, "")), value)
            names.setdefault(unit, labels.get(metrics.LABEL_UNIT_NAME, ""))
        samples = number(labels.get(metrics.LABEL_SAMPLES, ""), MOST_SAMPLES)
        if name == metrics.UNIT_SECONDS and samples and 0 <= value <= MOST_SECONDS:
            seconds.setdefault((unit, samples, labels.get(metrics.LABEL_PHASE, "")), value)
    measured = sorted({samples for _, samples, _ in seconds})
    if len(measured) > metrics.MAX_PROFILED_SIZES:
        return f"it has more than {metrics.MAX_PROFILED_SIZES} sizes of micro-batches"
    found: list[UnitProfile] = []
    for unit in range(units):
        own = {what: sizes[unit, what] for what in metrics.WHATS if (unit, what) in sizes}
        points = _points(unit, seconds, measured)
        if len(own) < len(metrics.WHATS) or not points:
            missing = "seconds" if len(own) == len(metrics.WHATS) else "bytes"
            return f"the {missing} of unit {unit} are missing or implausible"
        found.append(_unit_profile(names[unit], own, {pool: points}))
    return PoolProfile(
        memory_bytes=int(memory_bytes),
        units=tuple(found),
        state_ratio=gauges.state_ratio,
        update_s_per_byte=gauges.update_s_per_byte,
        can_shard=gauges.can_shard,
    )


def _points(unit: int, seconds: Mapping[tuple[int, int, str], float], sizes: Sequence[int]) -> tuple[UnitSeconds, ...]:
    """Return a unit's seconds at those sizes of which all phases are known."""
    return tuple(
        UnitSeconds(
            micro_batch_samples=samples,
            forward_s=seconds[unit, samples, metrics.PHASE_FORWARD],
            backward_s=seconds[unit, samples, metrics.PHASE_BACKWARD],
        )
        for samples in sizes
        if all((unit, samples, phase) in seconds for phase in _PHASES)
    )


def _unit_profile(name: str, sizes: Mapping[str, float], seconds: Mapping[str, tuple[UnitSeconds, ...]]) -> UnitProfile:
    parameters, activations, boundary = (int(sizes[what]) for what in metrics.WHATS)
    return UnitProfile(
        name=_plausible(name),
        parameter_bytes=parameters,
        activation_bytes=activations,
        boundary_bytes=boundary,
        seconds=seconds,
    )


def _plausible(name: str) -> str:
    """Return a unit's name, empty where no model has such a name."""
    return name if len(name) <= metrics.MOST_UNIT_NAME and _NAME.fullmatch(name) else ""
