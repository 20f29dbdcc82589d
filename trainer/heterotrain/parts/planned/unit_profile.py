"""Measures a model's units on this device, as the layout planner needs them: times, parameters, bytes kept and sent.

Inputs of a unit are the outputs of the unit before it, so ``trace`` has to accept the model. Times are the median of a
few runs. Where the container's processors are limited, a run takes no less than its processor time on the processors
that it may use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from heterotrain_core.units import UnitProfile, UnitSeconds

from heterotrain.errors import UsageError
from heterotrain.parts.planned.processors import Clock, Moment, clocks, lasting_s
from heterotrain.parts.stages.stage_model import StageModel
from heterotrain.parts.stages.trace import PassTrace, trace
from heterotrain.parts.units.initial_weights import InitialValues, first_line
from heterotrain.parts.units.units import Units

RUNS = 5
"""Runs of a unit at one size at most, the first of which does not count."""
SIZES = (1, 2, 4)
"""Samples of a micro-batch."""


def profile(
    build: Callable[[], Units],
    inputs: Callable[[int], Any],
    *,
    kind: str,
    values: InitialValues,
    limit_s: float = 60.0,
    sizes: Sequence[int] = SIZES,
    processors: float = math.inf,
    clock: Clock = time.perf_counter,
    processor_clock: Clock = time.process_time,
) -> tuple[UnitProfile, ...]:
    """Return what was measured of each unit; only one unit at a time has memory.

    Args:
        build: returns the units of a new model on the meta device.
        inputs: returns the inputs of a micro-batch of so many samples, on the device.
        kind: name of the device's kind.
        values: initial ones of the layers, on the device to measure on.
        limit_s: seconds after which no further run begins; each unit and size has one run in any case.
        sizes: of micro-batches, growing.
        processors: that computation may use for long; infinity for no limit. See ``usable_processors``.
        clock: returns seconds.
        processor_clock: returns this process's processor seconds.

    Raises:
        UsageError: the model is not a sequence of its units, or a unit fails or computes nothing.
    """
    now = clocks(values.device, clock, processor_clock)
    units = build()
    seen, end_s = trace(units, inputs(sizes[0])), now().wall_s + limit_s
    batches = {size: inputs(size) for size in sizes}
    received: dict[int, tuple[torch.Tensor, ...] | None] = dict.fromkeys(sizes)
    found = []
    for unit, name in enumerate(units.names):
        own = build()
        part = StageModel(own, seen, start=unit, stop=unit + 1)
        values.fill(own, part.parts)
        points = []
        for size in sizes:
            try:
                forward, backward, output = _measured(part, received[size], batches[size], now, end_s)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError) as error:
                why = first_line(error)
                raise UsageError(
                    f"{name} fails on the first samples ({why}): try one batch without job.wrap"
                ) from error
            forward_s, backward_s = lasting_s(forward, processors), lasting_s(backward, processors)
            points.append(UnitSeconds(micro_batch_samples=size, forward_s=forward_s, backward_s=backward_s))
            received[size] = output
        found.append(_profile_of(seen, unit, name, {kind: tuple(points)}))
    return tuple(found)


def _profile_of(seen: PassTrace, unit: int, name: str, seconds: Mapping[str, tuple[UnitSeconds, ...]]) -> UnitProfile:
    return UnitProfile(
        name=name, parameter_bytes=seen.parameter_bytes[unit], activation_bytes=seen.activation_bytes[unit],
        boundary_bytes=seen.boundary_bytes[unit], seconds=seconds,
    )  # fmt: skip


def _measured(
    part: StageModel, received: tuple[torch.Tensor, ...] | None, inputs: Any, now: Callable[[], Moment], end_s: float
) -> tuple[list[Moment], list[Moment], tuple[torch.Tensor, ...]]:
    """Return the times of a unit's forward passes and of its backward passes, and what it hands on."""
    forward: list[Moment] = []
    backward: list[Moment] = []
    for run in range(RUNS):
        start = None
        if received is not None:
            start = (received[0].detach().requires_grad_(received[0].is_floating_point()), *received[1:])
        began = now()
        output = part.forward(start, inputs)
        between = now()
        passed = output if isinstance(output, tuple) else (output,)
        if not isinstance(passed[0], torch.Tensor):
            raise UsageError(f"the model's output is a {type(output).__name__}: its last unit has to return a tensor")
        if passed[0].requires_grad:
            torch.autograd.backward(passed[0], torch.ones_like(passed[0]))
        ended = now()
        if run == 1:  # the first one also makes buffers and compiles
            forward, backward = [], []
        forward.append(began.until(between))
        backward.append(between.until(ended))
        if ended.wall_s >= end_s:
            break
    return forward, backward, tuple(tensor.detach() for tensor in passed)
