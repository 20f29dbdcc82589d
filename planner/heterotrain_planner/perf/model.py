"""Fitted time models of a job's members and of their exchange, and how far to trust them."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum

from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime


class FitQuality(StrEnum):
    """How far to trust a fit."""

    OK = "ok"
    """Slope and fixed part are known well enough to predict other shares."""
    THIN = "thin"
    """Usable near the observed shares; further away it rests on an assumption."""
    DEGENERATE = "degenerate"
    """The data do not determine a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """How well a line is known: the error of a weighted regression, as a function of the size.

    Attributes:
        centre_samples: weighted mean of the observed micro-batch sizes.
        centre_s: standard error of the line's seconds there.
        slope_s: standard error of its slope, seconds per sample; independent of the error at the centre.
    """

    centre_samples: float
    centre_s: float
    slope_s: float

    def at(self, samples: float) -> float:
        """Return the standard error in seconds at a micro-batch of this size."""
        return math.hypot(self.centre_s, self.slope_s * (samples - self.centre_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCurve:
    """Seconds of a micro-batch where they are known to stray from the line: straight between points, never falling.

    Attributes:
        points: (samples, seconds), by growing samples.
        errors: relative standard error of each point.
    """

    points: tuple[tuple[float, float], ...]
    errors: tuple[float, ...]

    def error_at(self, samples: float) -> float:
        """Return the relative standard error at a micro-batch of this size, between the points by interpolation."""
        sizes = [size for size, _ in self.points]
        last = bisect_right(sizes, samples)
        if last in (0, len(sizes)):
            return self.errors[0 if last == 0 else -1]
        part = (samples - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        return (1 - part) * self.errors[last - 1] + part * self.errors[last]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberModel:
    """One member's time model.

    Attributes:
        compute: the coefficients; ``None`` when the quality is degenerate.
        variation: standard deviation of own compute seconds in one step, relative to their mean; without the part that
            all members share, where that is known, and without hiccups.
        hiccups: rare long steps; those of the job's members together.
        uncertainty_ratio: relative standard error of predicted compute seconds at half and twice the typical share,
            the worse of the two, from the data of the member and its pool alone; ``inf`` when they do not determine it.
        error: the same at any size; ``None`` when the data do not determine it.
        curve: the times where they are known to stray from the line, at the same pace; ``None`` where the line holds.
            It counts for shares of the present batch; another batch, other members and forecasts rest on the line.
        largest_share_samples: largest observed share.
        steps: observed steps.
        shapes: distinct observed micro-batch sizes.
        pooled: whether it leans on others of its pool, of which more shares would teach nothing.
        steps_at_speed: steps since the last change of speed, all steps without any.
        drifted: whether the speed changed, and only few steps of one share were observed since.
        drift_ratio: new over old seconds at the last change (2.0: half as fast), 1.0 without any.
        quality: how far to trust the model.
        reason: the reason for the quality, in one sentence.
    """

    compute: ComputeTime | None
    variation: float = 0.0
    hiccups: Hiccups = NO_HICCUPS
    uncertainty_ratio: float = float("inf")
    error: LineError | None = None
    curve: TimeCurve | None = None
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
        communication: T_o, T_u and gamma; ``None`` before any measurement.
        gamma_deviation: standard error of gamma.
        overhead_s: seconds of a step that are neither compute nor exchange: the cost of the training loop itself.
        generation: of the plan between whose members the exchange was measured; ``None`` where that is not known.
        reason: the evidence, in one sentence.
    """

    communication: CommunicationTime | None
    gamma_deviation: float = 0.0
    overhead_s: float = 0.0
    generation: int | None = None
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
    scaled = error and LineError(
        centre_samples=error.centre_samples, centre_s=ratio * error.centre_s, slope_s=ratio * error.slope_s
    )
    bent = model.curve and replace(model.curve, points=tuple((n, ratio * s) for n, s in model.curve.points))
    return replace(model, compute=slower, error=scaled, curve=bent)
