"""Exports what was measured of the model's units, from which the operator plans which device holds which of them."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract import metrics as names
from heterotrain_core.units import UnitProfile

from heterotrain.errors import UsageError
from heterotrain.telemetry.report import GaugeTable, RankMetrics


def report_units(
    report: RankMetrics, profiles: Sequence[UnitProfile], *, kind: str, memory_bytes: int,
    state_ratio: float | None = None, update_s_per_byte: float | None = None, can_shard: bool = False,
) -> None:  # fmt: skip
    """Export the profile of all units, and say that it is complete; a scrape sees all of it or nothing.

    Args:
        report: of this rank.
        profiles: of every unit, in the order of computation.
        kind: name under which the profiles hold this device's seconds.
        memory_bytes: memory of the device that training state and activations may take.
        state_ratio: bytes of training state for each byte of parameters; ``None`` where that is not known.
        update_s_per_byte: seconds of the optimizers for each byte of parameters; ``None`` where that is not known.
        can_shard: whether this rank can hold parts of units.

    Raises:
        UsageError: the model has more units, or the profile more sizes of micro-batches, than a rank exports.
    """
    _check_exported(profiles, kind)
    seconds = [
        ((str(index), name, str(point.micro_batch_samples)), value)
        for index, unit in enumerate(profiles)
        for point in unit.seconds[kind]
        for name, value in ((names.PHASE_FORWARD, point.forward_s), (names.PHASE_BACKWARD, point.backward_s))
    ]
    sizes_bytes = [
        ((str(index), unit.name[-names.MOST_UNIT_NAME :].strip(), what), float(value))
        for index, unit in enumerate(profiles)
        for what, value in (
            (names.WHAT_PARAMETERS, unit.parameter_bytes),
            (names.WHAT_ACTIVATIONS, unit.activation_bytes),
            (names.WHAT_BOUNDARY, unit.boundary_bytes),
        )
    ]
    report.tables(
        {
            names.UNIT_SECONDS: GaugeTable(
                labels=(names.LABEL_UNIT, names.LABEL_PHASE, names.LABEL_SAMPLES), rows=tuple(seconds)
            ),
            names.UNIT_BYTES: GaugeTable(
                labels=(names.LABEL_UNIT, names.LABEL_UNIT_NAME, names.LABEL_WHAT), rows=tuple(sizes_bytes)
            ),
        },
        {
            names.UNITS: float(len(profiles)),
            names.USABLE_MEMORY: float(memory_bytes),
            names.UNIT_PROFILE_COMPLETE: 1.0,
            names.CAN_SHARD: float(can_shard),
            **({} if state_ratio is None else {names.STATE_RATIO: state_ratio}),
            **({} if update_s_per_byte is None else {names.UPDATE_SECONDS_PER_BYTE: update_s_per_byte}),
        },
    )


def _check_exported(profiles: Sequence[UnitProfile], kind: str) -> None:
    if len(profiles) > names.MAX_PROFILED_UNITS:
        raise UsageError(
            f"the model has {len(profiles)} units, and stages are planned for at most {names.MAX_PROFILED_UNITS}: make "
            "each unit of several layers"
        )
    sizes = {point.micro_batch_samples for unit in profiles for point in unit.seconds[kind]}
    if len(sizes) > names.MAX_PROFILED_SIZES:
        raise UsageError(
            f"the units were measured with {len(sizes)} sizes of micro-batches, and at most "
            f"{names.MAX_PROFILED_SIZES} are exported: measure fewer sizes"
        )
