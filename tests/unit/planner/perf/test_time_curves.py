"""Time curves: none where lines hold, true where times are bent, with errors that are true as well."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.curve import lines_rejected, time_curves
from heterotrain_planner.perf.fit import fit_data
from heterotrain_planner.perf.model import MemberModel, TimeCurve, at_pace, compute_s
from heterotrain_planner.perf.regression_data import RegressionData, summarize
from scipy.stats import chi2
from support.repeat import times

SIZES = (50, 150, 50, 150, *[100] * 12, 60, 180, 60, 180, *[120] * 12)
"""Two epochs of one batch, each with a probe first."""
EDGE = ((20, 0.17), (115, 0.28), (231, 0.60), (327, 0.60), (400, 0.96))
"""Seconds of ResNet-50 on an RTX 6000 by micro-batch (Sia's artifact), without the fall from 231 to 327."""


def seconds_on(points: tuple[tuple[int, float], ...], size: int) -> float:
    """Return the seconds between measured points."""
    xs, ys = zip(*points, strict=True)
    return float(np.interp(size, xs, ys))


def scraped(
    sizes: tuple[int, ...], seconds: dict[int, float], rng: np.random.Generator, *, noise: float, steps: int = 8
) -> RegressionData | None:
    """Return a member's data: the mean and the variance of so many noisy steps at each of these sizes."""
    seen, now_s = [], 0.0
    for size in sizes:
        drawn_s = seconds[size] * (1 + noise * rng.standard_normal(steps))
        now_s += float(drawn_s.sum())
        moments = MeanVariance(mean=float(drawn_s.mean()), variance=float(drawn_s.var(ddof=1)))
        seen.append(Observation(member="a", share_samples=size, steps=steps, ended_s=now_s, compute=moments))
    return summarize(seen, steady=True)


def fitted(data: RegressionData | None) -> MemberModel:
    """Return the line near the last size."""
    assert data is not None
    return fit_data(data, here_samples=data.size_now)


def at(curve: TimeCurve, size: float) -> float:
    """Return the curve's seconds."""
    xs, ys = zip(*curve.points, strict=True)
    return float(np.interp(size, xs, ys))


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_lines_stay_lines(seed: int) -> None:
    """Members whose times are lines have no curve, whatever the noise; chance bends one pool in a thousand."""
    rng = np.random.default_rng(seed)
    data, noise = [], float(rng.choice([0.01, 0.03, 0.1]))
    for _ in range(4):
        slope, fixed = rng.uniform(0.001, 0.02), rng.uniform(0.0, 1.0)
        data.append(scraped(SIZES, {size: slope * size + fixed for size in SIZES}, rng, noise=noise))
    assert time_curves(data, [fitted(each) for each in data], ["t4"] * 4) == (None,) * 4


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 20, 64, 500, 4000])
def test_lines_are_rejected_where_chance_alone_strays_as_far_in_one_of_a_thousand_cases(freedom: int) -> None:
    """The oracle is the exact chi-squared distribution, however the sum is spread over members."""
    rng = np.random.default_rng(freedom)
    members = int(rng.integers(1, min(freedom, 40) + 1))
    degrees = 1 + rng.multinomial(freedom - members, np.full(members, 1 / members))
    for chance, rejected in ((0.1, False), (0.0014, False), (0.0007, True), (1e-6, True)):
        squares = chi2.isf(chance, freedom) * rng.dirichlet(np.ones(members))
        assert lines_rejected(list(zip(squares.tolist(), degrees.tolist(), strict=True))) is rejected
    assert not lines_rejected([(0.0, 0)])


@pytest.mark.parametrize("seed", range(times(gate=6, every=200)))
def test_bent_times_are_followed(seed: int) -> None:
    """Times that jump between two sizes: the curve is closer to the truth than the line, and never falls."""
    rng = np.random.default_rng(seed)
    sizes = (200, 300, 200, 300, *[400] * 12, 250, 350, 250, 350, *[300] * 12)
    truth = {size: seconds_on(EDGE, size) for size in sizes}
    data = scraped(sizes, truth, rng, noise=0.03)
    model = fitted(data)
    (curve,) = time_curves([data], [model], [""])
    assert curve is not None
    assert model.compute is not None
    of_line = max(abs(compute_s(model.compute, size) / seconds - 1) for size, seconds in truth.items())
    of_curve = max(abs(at(curve, size) / seconds - 1) for size, seconds in truth.items())
    assert of_line > 0.1
    assert of_curve < 0.035
    assert all(later[1] >= former[1] for former, later in pairwise(curve.points))
    # Far from all sizes it is the line; errors are small where times were seen, and grow from there.
    for far in (curve.points[0], curve.points[-1]):
        assert far[1] == pytest.approx(compute_s(model.compute, 0) + slope_of(model) * far[0])
    assert curve.error_at(300) < 0.02
    assert curve.error_at(300) < curve.error_at(325) < curve.error_at(600) < curve.error_at(2000)
    assert curve.error_at(1e9) == curve.errors[-1]


def slope_of(model: MemberModel) -> float:
    """Return seconds a sample."""
    assert model.compute is not None
    return model.compute.per_sample_s + model.compute.backward_per_sample_s


def test_errors_are_true() -> None:
    """Random bent times: at the sizes seen, the truth is within two of the stated errors in 19 of 20 cases.

    The truth is drawn as the model assumes it: a line times the exponential of a process whose correlation falls with
    the logarithm of the ratio of sizes.
    """
    inside = cases = bent = 0
    improved = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        sizes = np.unique(SIZES)
        apart = np.abs(np.log(sizes[:, None] / sizes))
        process = rng.multivariate_normal(np.zeros(len(sizes)), 0.1**2 * np.exp(-apart / 0.5))
        truth = {int(n): (0.002 * n + 0.1) * math.exp(g) for n, g in zip(sizes, process, strict=True)}
        data = scraped(SIZES, truth, rng, noise=0.05)
        model = fitted(data)
        (curve,) = time_curves([data], [model], [""])
        if curve is None:
            continue
        bent += 1
        assert model.compute is not None
        for size, seconds in truth.items():
            cases += 1
            inside += abs(math.log(at(curve, size) / seconds)) <= 2 * curve.error_at(size)
            improved.append(
                (math.log(compute_s(model.compute, size) / seconds) ** 2, math.log(at(curve, size) / seconds) ** 2)
            )
    assert bent > 60
    assert inside / cases > 0.93
    of_line, of_curve = np.mean(improved, axis=0)
    assert of_curve < of_line / 4


def test_rare_steps_count_less_than_frequent_ones() -> None:
    """One noisy scrape at a bent size moves the curve only part of the way that many scrapes move it."""
    way = []
    for count in (1, 10):
        rng = np.random.default_rng(5)
        sizes = (*[300] * count, 200, 400, *[200, 400] * 10)
        truth = {200: 0.5, 300: 0.55, 400: 0.9}
        data = scraped(sizes, truth, rng, noise=0.1, steps=4)
        model = fitted(data)
        (curve,) = time_curves([data], [model], [""])
        assert curve is not None
        assert model.compute is not None
        line_s = compute_s(model.compute, 300)
        measured_s = float(data.seconds_O[:count].mean()) if data is not None else 0.0
        way.append((at(curve, 300) - line_s) / (measured_s - line_s))
    assert 0.2 < way[0] < way[1] < 1.05


def test_members_of_a_pool_are_judged_together() -> None:
    """A bend shows in some members alone, and in all twelve of a pool; nameless pools are not one pool."""
    truth = {size: (0.002 * size + 0.1) * (1.04 if size in (100, 120) else 1.0) for size in SIZES}
    data = [scraped(SIZES, truth, np.random.default_rng(seed), noise=0.06) for seed in range(12)]
    models = [fitted(each) for each in data]
    alone = time_curves(data, models, [""] * 12)
    together = time_curves(data, models, ["t4"] * 12)
    assert sum(curve is not None for curve in alone) <= 8
    assert all(curve is not None for curve in together)


def test_only_members_with_a_steady_line_have_curves() -> None:
    """Without data, without a line, or while a changed speed is being learned, there is none."""
    sizes = (200, 300, 200, 300, *[400] * 12)
    data = scraped(sizes, {n: seconds_on(EDGE, n) for n in sizes}, np.random.default_rng(1), noise=0.01)
    model = fitted(data)
    assert time_curves([data], [model], [""])[0] is not None
    for seen, other in ((None, model), (data, replaced(model, compute=None)), (data, replaced(model, drifted=True))):
        assert time_curves([seen], [other], [""]) == (None,)


def replaced(model: MemberModel, **changes: object) -> MemberModel:
    """Return the model with other values."""
    return replace(model, **changes)  # type: ignore[arg-type]  # tests pass what they mean


def test_two_times_of_one_size_that_contradict_each_other_both_count() -> None:
    """Sizes close together with exact and different times: the knot lies between them."""
    sizes = (100, 103, 100, 103, 200, 400, 200, 400)
    data = scraped(sizes, {100: 0.1, 103: 0.106, 200: 0.4, 400: 0.5}, np.random.default_rng(1), noise=0.0)
    (curve,) = time_curves([data], [fitted(data)], [""])
    assert curve is not None
    assert at(curve, 101.5) == pytest.approx(0.103, rel=0.02)


def test_the_pace_of_all_members_scales_the_curve() -> None:
    """A shared slowness makes all times longer, and no relative error larger."""
    curve = TimeCurve(points=((10.0, 1.0), (20.0, 1.5)), errors=(0.01, 0.02))
    sizes = (100, 200)
    model = fitted(scraped(sizes, {100: 1.0, 200: 2.0}, np.random.default_rng(1), noise=0.01))
    slower = at_pace(replaced(model, curve=curve), 2.0).curve
    assert slower == TimeCurve(points=((10.0, 2.0), (20.0, 3.0)), errors=(0.01, 0.02))


def bent(by: float, members: int, sizes: tuple[int, ...]) -> list[RegressionData | None]:
    """Return data of equal members whose times bend by this part, up and down from size to size.

    Times of a size differ by 0.01 % in turn: they show neither more noise than assumed nor noise that goes on.
    """
    sign = {size: (-1) ** place for place, size in enumerate(sorted(set(sizes)))}
    seen = [
        Observation(
            member="a",
            share_samples=size,
            steps=8,
            ended_s=10.0 * (turn + 1),
            compute=MeanVariance(
                mean=(0.002 * size + 0.1) * (1 + by * sign[size]) * (1 + 1e-4 * (-1) ** turn), variance=0.0
            ),
        )
        for turn, size in enumerate(sizes)
    ]
    return [summarize(seen, steady=True)] * members


def squares_beyond_lines(data: list[RegressionData | None]) -> float:
    """Return by how many squared standard errors the times miss the best line of each member."""
    total = 0.0
    for seen in data:
        assert seen is not None
        root_O = np.sqrt(seen.weight_O) / seen.seconds_O
        lines_O2 = np.stack([seen.size_O, np.ones(len(seen.size_O))], axis=1) * root_O[:, None]
        total += float(np.linalg.lstsq(lines_O2, seen.seconds_O * root_O, rcond=None)[1][0])
    return total


@pytest.mark.parametrize(
    ("members", "sizes"),
    [
        (1, (100, 150, 200) * 6),
        (3, (100, 150, 200) * 6),
        (6, (100, 150, 200) * 6),
        (4, (100, 130, 160, 200, 250) * 4),
        (8, (100, 130, 160, 200, 250) * 4),
    ],
)
def test_observations_reject_lines_at_the_quantile(members: int, sizes: tuple[int, ...]) -> None:
    """The smallest bend with a curve misses lines by the squares that chance exceeds once in a thousand."""
    least, most = 0.0, 0.2
    for _ in range(12):
        middle = (least + most) / 2
        data = bent(middle, members, sizes)
        if time_curves(data, [fitted(data[0])] * members, ["t4"] * members)[0] is None:
            least = middle
        else:
            most = middle
    freedom = members * (len(set(sizes)) - 2)
    assert squares_beyond_lines(bent(most, members, sizes)) == pytest.approx(chi2.isf(0.001, freedom), rel=0.05)
