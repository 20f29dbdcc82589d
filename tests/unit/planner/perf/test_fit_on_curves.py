"""Times of real GPUs are not linear: below some share they barely depend on it. A fit has to follow to new sizes."""

from __future__ import annotations

import numpy as np
import pytest
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.fit import fit_member
from heterotrain_planner.perf.model import compute_s

# Milliseconds of ResNet-18 on an A100 (figures of Sia's artifact): flat up to 90 samples.
CURVE = ((32, 34.33), (64, 34.73), (91, 36.61), (182, 40.78), (257, 49.05), (513, 71.57), (1025, 118.7))


def seen(share: int, steps: int, ended_s: float) -> Observation:
    """Return an observation on the curve."""
    xs, ys = zip(*CURVE, strict=True)
    mean = float(np.interp(share, xs, ys)) * 1e-3
    return Observation(
        member="a",
        share_samples=share,
        steps=steps,
        ended_s=ended_s,
        compute=MeanVariance(mean=mean, variance=(0.02 * mean) ** 2),
    )


def an_epoch_of_small_shares() -> list[Observation]:
    """Even shares of 32, and a probe around them."""
    probe = [seen(share, 8, 5.0) for share in (22, 32, 42)]
    return [*probe, seen(32, 40, 10.0), seen(32, 40, 15.0)]


@pytest.mark.parametrize("steps", [10, 30, 200])
def test_times_far_beyond_other_sizes_are_believed(steps: int) -> None:
    """One scrape at eight times the share, far above the line of all before it, is predicted at once."""
    model = fit_member([*an_epoch_of_small_shares(), seen(257, steps, 20.0)])
    assert model.compute is not None
    assert compute_s(model.compute, 257) == pytest.approx(0.049, rel=0.1)
    assert compute_s(model.compute, 513) > 0.06


def test_they_stay_believed() -> None:
    """After more scrapes there, too."""
    later = [seen(257, 13, 20.0 + 2 * i) for i in range(6)]
    model = fit_member([*an_epoch_of_small_shares(), *later])
    assert model.compute is not None
    assert compute_s(model.compute, 257) == pytest.approx(0.049, rel=0.1)


def test_they_are_not_forgotten_when_shares_become_small_again() -> None:
    """One epoch at a large share among many at small ones: the large share still counts."""
    few = [seen(1025, 10, 20.0 + i) for i in range(2)]
    again = [seen(share, 40, 30.0 + i) for i, share in enumerate((32, 28, 36, 32, 32, 32, 30, 34))]
    model = fit_member([*an_epoch_of_small_shares(), *few, *again])
    assert model.compute is not None
    assert compute_s(model.compute, 1025) == pytest.approx(0.1187, rel=0.1)
    assert compute_s(model.compute, 32) == pytest.approx(0.0343, rel=0.1)


def test_near_the_shares_the_fit_matches_the_observations() -> None:
    """No line goes through 91, 182 and 513; the fit goes through the current share, at the expense of the others."""
    for now in (182, 257):
        history = [seen(share, 8, 5.0) for share in (91, 182, 513)] + [seen(513, 40, 6.0 + i) for i in range(4)]
        model = fit_member([*history, *(seen(now, 20, 20.0 + i) for i in range(6))], here_samples=now)
        assert model.compute is not None
        assert compute_s(model.compute, now) == pytest.approx(dict(CURVE)[now] * 1e-3, rel=0.01)


def test_implausible_times_are_outliers_at_any_size() -> None:
    """A hiccup in the only steps at another share costs more than in proportion, and is left out."""
    hiccup = seen(64, 12, 20.0)
    assert hiccup.compute is not None
    slow = Observation(
        member="a",
        share_samples=64,
        steps=12,
        ended_s=20.0,
        compute=MeanVariance(mean=4 * hiccup.compute.mean, variance=hiccup.compute.variance),
    )
    again = [seen(share, 40, 30.0 + i) for i, share in enumerate((32, 28, 36, 32))]
    model = fit_member([*an_epoch_of_small_shares(), slow, *again])
    assert model.compute is not None
    assert compute_s(model.compute, 64) < 0.06
