"""Variations as the split takes them: differences that chance explains disappear, others stay."""

from __future__ import annotations

import numpy as np
import pytest
from heterotrain_planner.perf.model import FitQuality, MemberModel
from heterotrain_planner.planning.variation import shrunk_variations


def models(variations: list[float], steps: int) -> list[MemberModel]:
    return [
        MemberModel(compute=None, variation=v, steps=steps, steps_at_speed=steps, quality=FitQuality.OK, reason="")
        for v in variations
    ]


def test_equal_members_get_one_variation_in_nearly_all_draws() -> None:
    """Estimates from twenty normal steps each: at most 2 % of draws keep a difference."""
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(500):
        estimates = (0.05 * rng.standard_normal((8, 20))).std(axis=1, ddof=1)
        found = shrunk_variations(models(estimates.tolist(), 20))
        kept += max(found) - min(found) > 1e-9
        assert 0.03 < min(found) <= max(found) < 0.08
    assert kept <= 10


def test_a_noisy_member_stays_noisy() -> None:
    found = shrunk_variations(models([0.03] * 12 + [0.2] * 4, 60))
    assert found[0] == pytest.approx(0.03, rel=0.1)
    assert found[-1] == pytest.approx(0.2, rel=0.1)


def test_more_steps_bring_the_estimates_back() -> None:
    """The part that an estimate keeps grows with the steps, and never exceeds one."""
    parts = []
    for steps in (5, 20, 100, 1000):
        low, high = shrunk_variations(models([0.05, 0.13], steps))
        parts.append(np.log(high / low) / np.log(0.13 / 0.05))
    assert parts == sorted(parts)
    assert parts[0] == pytest.approx(0.0)
    assert 0.95 < parts[-1] < 1.0


@pytest.mark.parametrize("steps", [10, 40, 160])
def test_what_an_estimate_keeps_makes_the_least_error(steps: int) -> None:
    """Drawn truths and estimates whose logarithms err by twice the variance of normal steps, as real steps do."""
    rng = np.random.default_rng(4)
    true_M = rng.normal(np.log(0.1), 0.25, 400)
    seen_M = true_M + rng.normal(0.0, np.sqrt(2 / (2 * steps)), 400)
    found_M = np.log(shrunk_variations(models(np.exp(seen_M).tolist(), steps)))
    mean = seen_M.mean()
    kept = float(((found_M - mean) @ (seen_M - mean)) / ((seen_M - mean) @ (seen_M - mean)))
    errors = {part: float(((mean + part * (seen_M - mean) - true_M) ** 2).mean()) for part in np.arange(0, 1.01, 0.01)}
    assert kept == pytest.approx(min(errors, key=lambda part: errors[part]), abs=0.12)


def test_members_without_steps() -> None:
    """They get the mean of the others; without any, the given variation stays."""
    alone = models([0.1, 0.2], 0)
    assert shrunk_variations(alone) == (0.1, 0.2)
    assert shrunk_variations([*models([0.05, 0.05], 40), *alone[:1]]) == pytest.approx((0.05, 0.05, 0.05))
