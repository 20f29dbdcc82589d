"""What was learned about a job's members and their exchange, with how far it can be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime


class FitQuality(StrEnum):
    """How far a fit can be trusted."""

    OK = "ok"
    """Slope and fixed part are known well enough to predict other shares."""
    THIN = "thin"
    """Usable near the shares that were seen; further away it rests on an assumption."""
    DEGENERATE = "degenerate"
    """No model follows from the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """How well a line is known: the error of a weighted regression, as a function of the size.

    Attributes:
        centre_samples: weighted mean of the micro-batch sizes that were seen.
        centre_s: standard error of the line's seconds there.
        slope_s: standard error of its slope, seconds per sample; independent of the error at the centre.
    """

    centre_samples: float
    centre_s: float
    slope_s: float

    def at(self, samples: float) -> float:
        """Return the standard error in seconds at a micro-batch of so many samples."""
        return math.hypot(self.centre_s, self.slope_s * (samples - self.centre_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberModel:
    """One member's time model.

    Attributes:
        compute: the coefficients; ``None`` when the quality is degenerate.
        variation: standard deviation of own compute seconds in one step, relative to their mean; without what all members
            have in common, where that is known.
        uncertainty_ratio: relative standard error of predicted compute seconds at half and twice the typical share,
            the worse of the two, from the data of the member and its pool alone; ``inf`` when they cannot tell.
        error: the same at any size; ``None`` when the data cannot tell.
        largest_share_samples: the largest share that was seen.
        steps: steps that the fit rests on.
        shapes: distinct micro-batch sizes that were seen.
        pooled: others of its pool are known well, and it leans on them.
        steps_at_speed: steps since its speed changed last, all of them when it never did.
        drifted: its speed changed, and the new one has been seen for few steps of one share only.
        drift_ratio: how much slower it became at the last change (2.0: half as fast), 1.0 when it never changed.
        quality: how far to trust it.
        reason: why, in one sentence.
    """

    compute: ComputeTime | None
    variation: float = 0.0
    uncertainty_ratio: float = float("inf")
    error: LineError | None = None
    largest_share_samples: int = 0
    steps: int = 0
    shapes: int = 0
    pooled: bool = False
    steps_at_speed: int = 0
    drifted: bool = False
    drift_ratio: float = 1.0
    quality: FitQuality
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """The cluster's exchange.

    Attributes:
        communication: T_o, T_u and gamma; ``None`` while nobody has measured any.
        gamma_deviation: standard error of gamma.
        overhead_s: seconds of a step that are neither compute nor exchange: what the loop itself costs.
        reason: what it rests on, in one sentence.
    """

    communication: CommunicationTime | None
    gamma_deviation: float = 0.0
    overhead_s: float = 0.0
    reason: str


def compute_s(compute: ComputeTime, samples: int, *, micro_batches: int = 1) -> float:
    """Return own seconds C(n) = (q + k) n + (s + m) M + update for a share of ``samples`` in M micro-batches."""
    rate = compute.per_sample_s + compute.backward_per_sample_s
    fixed = compute.fixed_s + compute.backward_fixed_s
    return rate * samples + fixed * (micro_batches if samples else 0) + compute.update_s


def at_pace(model: MemberModel, ratio: float) -> MemberModel:
    """Return the model of the same member when every step takes ``ratio`` times as long."""
    c, error = model.compute, model.error
    if c is None or ratio == 1.0:
        return model
    slower = ComputeTime(
        per_sample_s=ratio * c.per_sample_s,
        fixed_s=ratio * c.fixed_s,
        backward_per_sample_s=ratio * c.backward_per_sample_s,
        backward_fixed_s=ratio * c.backward_fixed_s,
        update_s=ratio * c.update_s,
    )
    told = error and LineError(
        centre_samples=error.centre_samples, centre_s=ratio * error.centre_s, slope_s=ratio * error.slope_s
    )
    return replace(model, compute=slower, error=told)
