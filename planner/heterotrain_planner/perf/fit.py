"""A member's time model from its observations.

Seconds of phases that every micro-batch repeats, divided by the number of micro-batches, are a line in the micro-batch
size, ``y = q x + s``. So steps with and without accumulation are one regression. It is weighted by relative error
(variance of the mean from telemetry, plus the model error of a line), keeps ``q`` and ``s`` non-negative, ignores
outliers (Tukey's bisquare), forgets, and uses a stated assumption on the fixed part as far as the data do not determine
it (``line``).
"""

from __future__ import annotations

from collections.abc import Sequence

from heterotrain_core.contract.plan import ComputeTime

from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.line import ASSUMED, LEAST_STEPS, FixedPart, fit_line, uncertainty
from heterotrain_planner.perf.model import FitQuality, MemberModel
from heterotrain_planner.perf.regression_data import RegressionData, summarize

TRUSTED_ERROR = 0.05
"""Relative error at half and twice the typical share up to which a model is ok."""


def fit_member(
    observations: Sequence[Observation], *, assumed: FixedPart = ASSUMED, here_samples: float | None = None
) -> MemberModel:
    """Return the member's model from its observations, oldest first; unusable observations are left out.

    With one share only, the fixed part is the ``assumed`` one, and the quality is thin unless that was observed in the
    member's pool. Never raises on telemetry.
    """
    return fit_data(summarize(observations), assumed=assumed, here_samples=here_samples)


def fit_data(
    seen: RegressionData | None, *, assumed: FixedPart = ASSUMED, here_samples: float | None = None
) -> MemberModel:
    """Return the model of the data, with the assumed fixed part as far as the data do not determine it.

    Where times are not linear, it is fitted for a micro-batch of ``here_samples``; ``None`` fits all sizes alike.
    """
    if seen is None:
        return MemberModel(
            compute=None, quality=FitQuality.DEGENERATE, reason="there is no usable observation of its compute time yet"
        )
    own = fit_line(
        seen.size_O,
        seen.seconds_O,
        weight_O=seen.weight_O,
        steps_O=seen.steps_O,
        newest_O=seen.newest_O,
        assumed=assumed,
        here_samples=here_samples,
    )
    compute = ComputeTime(
        per_sample_s=own.slope * seen.of_slope,
        fixed_s=own.fixed * seen.of_fixed,
        backward_per_sample_s=own.slope * (1 - seen.of_slope),
        backward_fixed_s=own.fixed * (1 - seen.of_fixed),
        update_s=seen.update_s,
    )
    shapes = len(set(seen.size_O.tolist()))
    steps = int(seen.steps_O.sum())
    error = uncertainty(own, seen.typical_samples)
    quality, reason = _quality(error, compute, shapes=shapes, steps=steps, pool=assumed.seen)
    return MemberModel(
        compute=compute if quality is not FitQuality.DEGENERATE else None,
        variation=seen.variation,
        uncertainty_ratio=error,
        error=own.error,
        largest_share_samples=seen.largest_share_samples,
        steps=steps,
        shapes=shapes,
        steps_at_speed=seen.steps_at_speed,
        drifted=seen.drifted,
        drift_ratio=seen.drift_ratio,
        quality=quality,
        reason=reason,
    )


def _quality(error: float, compute: ComputeTime, *, shapes: int, steps: int, pool: bool) -> tuple[FitQuality, str]:
    rate = compute.per_sample_s + compute.backward_per_sample_s
    fixed = compute.fixed_s + compute.backward_fixed_s
    if not (rate > 0 or fixed > 0 or compute.update_s > 0):
        return FitQuality.DEGENERATE, f"its compute time was zero in all of {steps} steps"
    if steps < LEAST_STEPS:
        return FitQuality.THIN, f"only {steps} steps were observed"
    if shapes == 1 and not pool:
        return FitQuality.THIN, f"only one share was observed in {steps} steps, so its fixed part is assumed"
    seen = f"{shapes} share{'s' if shapes > 1 else ''} in {steps} steps{' and others of its pool' if pool else ''}"
    if error > TRUSTED_ERROR:
        return FitQuality.THIN, f"{seen} predict other shares only to {min(error, 9.99):.0%}"
    return FitQuality.OK, f"{seen} predict other shares to {error:.1%}"
