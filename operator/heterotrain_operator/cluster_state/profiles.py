"""Profiles of the model's units, as workers have measured them, by pool, and the jobs that need them."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.units import UnitProfile

from heterotrain_operator.cluster_state.views import JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProfile:
    """The profile that one rank of a pool exports; the others of the pool are taken to be alike.

    Attributes:
        memory_bytes: of the rank's device, for training state and activations.
        units: in the order of computation; seconds are under the pool's name.
        state_ratio: bytes of training state for each byte of parameters; ``None`` where the rank exports none.
        update_s_per_byte: seconds of the optimizers for each byte of parameters, once a step; ``None`` where the rank
            exports none.
        can_shard: whether the rank can hold parts of units: its image and its optimizers allow that.
    """

    memory_bytes: int
    units: tuple[UnitProfile, ...]
    state_ratio: float | None = None
    update_s_per_byte: float | None = None
    can_shard: bool = False


def needs_profiles(job: JobView) -> bool:
    """Return whether the job's members are planned from profiles of the units."""
    return job.spec is not None and job.spec.parallelism.is_planned
