"""The units that a model is divided into, as a trainer measures them and the planner reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BEFORE, AFTER = "before ", "after "
"""The names of the units around a model's list of layers begin so. A model that is its list has no such units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """One measurement of a unit on a kind of device.

    Attributes:
        micro_batch_samples: size of the micro-batch, at least 1.
        forward_s: seconds of the forward pass of the whole micro-batch.
        backward_s: seconds of its backward pass.
    """

    micro_batch_samples: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitProfile:
    """What was measured of one unit.

    Attributes:
        name: for people, such as ``blocks.3``.
        parameter_bytes: of its own parameters.
        activation_bytes: kept for each sample from the forward pass until its backward pass.
        boundary_bytes: of its output for each sample; the gradient of the output has the same size.
        seconds: by name of the device kind: measurements by growing micro-batch. Between two of them times are
            linear; beyond the last one they grow in proportion to the samples; below the first one they stay.
    """

    name: str
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int
    seconds: Mapping[str, tuple[UnitSeconds, ...]]


def ends_inside(first: str) -> bool:
    """Return whether all units are in the model's list of layers, by the first one's name; unnamed ones may not be."""
    return bool(first) and not first.startswith(BEFORE)
