"""Learning-rate rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from heterotrain_core.scaling_rules import (
    Family,
    Scaling,
    Statistics,
    gain,
    learning_rate_scale,
    needed_statistics,
    warmed_up,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("scaling", "family", "phi", "expected"),
    [
        (Scaling.NONE, Family.SGD, 100.0, 1.0),
        (Scaling.LINEAR, Family.SGD, None, 4.0),
        (Scaling.LINEAR, Family.ADAPTIVE, None, 4.0),
        (Scaling.SQRT, Family.ADAPTIVE, None, 2.0),
        (Scaling.ADASCALE, Family.SGD, 64.0, 2.0 / 1.25),
        (Scaling.ADASCALE, Family.ADAPTIVE, 64.0, math.sqrt(2.0 / 1.25)),
        (Scaling.ADASCALE, Family.SGD, None, 1.0),
        (Scaling.ADASCALE, Family.SGD, math.inf, 1.0),
        (Scaling.ADASCALE, Family.SGD, 0.0, 1.0),
    ],
)
def test_rules(scaling: Scaling, family: Family, phi: float | None, expected: float) -> None:
    """A batch of 256 against a base of 64."""
    found = learning_rate_scale(scaling, family=family, samples=256, base_samples=64, noise_samples=phi)
    assert found == pytest.approx(expected)


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.floats(0, 1e8))
def test_adascale_lies_between_no_change_and_linear(base: int, more: int, phi: float) -> None:
    """No noise: nothing is gained by a larger batch. All noise: as much as linear."""
    batch = base + more
    worth = gain(samples=batch, base_samples=base, noise_samples=phi)
    assert 1 - 1e-12 <= worth <= batch / base * (1 + 1e-12)
    assert gain(samples=base, base_samples=base, noise_samples=phi) == pytest.approx(1.0)


def test_the_gain_is_the_expected_progress_of_a_step() -> None:
    """E<G, g>^2 / E|g|^2 of one large step against small ones: the ratio of useful step lengths is the gain."""
    rng = np.random.default_rng(0)
    mean, deviation, base, batch = np.full(50, 0.1), 0.8, 16, 128
    phi = 50 * deviation**2 / float(mean @ mean)

    def mean_square(samples: int) -> float:
        draws = mean + deviation / math.sqrt(samples) * rng.standard_normal((40_000, 50))
        return float((draws**2).sum(axis=1).mean())

    assert mean_square(base) / mean_square(batch) == pytest.approx(
        gain(samples=batch, base_samples=base, noise_samples=phi), rel=0.01
    )


def test_adaptive_optimizers_need_preconditioned_statistics() -> None:
    """Whatever way the rule was asked for, the optimizer decides; other rules need none."""
    assert needed_statistics(Scaling.ADASCALE, Family.ADAPTIVE) is Statistics.PRECONDITIONED
    assert needed_statistics(Scaling.ADASCALE, Family.SGD) is Statistics.PLAIN
    assert {needed_statistics(s, f) for s in Scaling if s is not Scaling.ADASCALE for f in Family} == {None}


def test_warm_up_is_a_straight_line() -> None:
    """From the old factor to the new one over so many samples, then the new one."""
    assert [warmed_up(5.0, since_samples=n, warm_up_samples=400, before=1.0) for n in (-10, 0, 100, 400, 900)] == [
        1.0,
        1.0,
        2.0,
        5.0,
        5.0,
    ]
    assert warmed_up(5.0, since_samples=0, warm_up_samples=0) == 5.0
