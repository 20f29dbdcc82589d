"""Progress of training: steps of different batches in steps of the published base batch.

A step of batch B counts as ``B / B_0 * (phi + B_0) / (phi + B)`` steps of the base batch B_0, with the current noise
scale ``phi`` (the AdaScale gain, Johnson et al. 2020, as in Pollux). A target after S steps of B_0 in the recorded run
is reached when these gains add up to S. This is a model of convergence, not a measurement.
"""

from __future__ import annotations

import itertools
import math

from heterotrain_planner.goodput import statistical_efficiency

from heterotrain_simulator.workloads import Workload


def noise_scale(workload: Workload, progress_steps: float) -> float:
    """Return the recorded noise scale at a progress, log-linear between points; infinite without a record."""
    points = workload.noise
    if not points:
        return math.inf
    if progress_steps <= points[0][0]:
        return points[0][1]
    for (p0, n0), (p1, n1) in itertools.pairwise(points):
        if progress_steps <= p1:
            part = (progress_steps - p0) / (p1 - p0)
            return math.exp((1 - part) * math.log(n0) + part * math.log(n1))
    return points[-1][1]


def gain(batch_samples: int, *, base_batch: int, noise_samples: float) -> float:
    """Return the worth of one step in steps of the base batch; ``B / B_0`` without a noise scale."""
    worth = 1.0
    if math.isfinite(noise_samples):
        worth = statistical_efficiency(batch_samples, base_samples=base_batch, noise_samples=noise_samples)
    return batch_samples / base_batch * worth
