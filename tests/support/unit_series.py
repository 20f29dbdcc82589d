"""The series of a rank's profile of the model's units: what the trainer exports and the operator reads."""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract import metrics
from heterotrain_core.units import UnitProfile, UnitSeconds

KIND = "a100"
MEMORY_BYTES = 2**30


def unit(index: int, *, sizes: Sequence[int] = (1, 2)) -> UnitProfile:
    """Return a unit whose figures show its place."""
    points = tuple(
        UnitSeconds(micro_batch_samples=n, forward_s=0.01 * n + index, backward_s=0.02 * n + index) for n in sizes
    )
    return UnitProfile(
        name=f"blocks.{index}" if index else "before blocks",
        parameter_bytes=1000 + index,
        activation_bytes=100 + index,
        boundary_bytes=10 + index,
        seconds={KIND: points},
    )


def series(profiles: Sequence[UnitProfile]) -> list[tuple[dict[str, str], float]]:
    """Return labels, without the identity's, and values of a complete profile."""
    found: list[tuple[dict[str, str], float]] = []
    for index, profile in enumerate(profiles):
        for point in profile.seconds[KIND]:
            for phase, value in (("forward", point.forward_s), ("backward", point.backward_s)):
                labels = {"unit": str(index), "samples": str(point.micro_batch_samples), "phase": phase}
                found.append(({"__name__": metrics.UNIT_SECONDS, **labels}, value))
        for what in ("parameters", "activations", "boundary"):
            value = {
                "parameters": profile.parameter_bytes,
                "activations": profile.activation_bytes,
                "boundary": profile.boundary_bytes,
            }[what]
            found.append(
                (
                    {"__name__": metrics.UNIT_BYTES, "unit": str(index), "unit_name": profile.name, "what": what},
                    float(value),
                )
            )
    found.append(({"__name__": metrics.UNITS}, float(len(profiles))))
    found.append(({"__name__": metrics.USABLE_MEMORY}, float(MEMORY_BYTES)))
    found.append(({"__name__": metrics.UNIT_PROFILE_COMPLETE}, 1.0))
    return found
