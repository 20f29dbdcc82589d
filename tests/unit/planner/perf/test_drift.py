"""A changed speed is noticed within 20 steps or two scrapes, and noise of a tenth is not."""

from __future__ import annotations

import numpy as np
import pytest
from heterotrain_planner.perf.drift import LATEST_STEPS, PaceChange, Point, SpeedPhase, changes, without_phases


def scrapes(
    rng: np.random.Generator,
    steps: int,
    *,
    count: int,
    changed_at: int,
    ratio: float,
    variation: float,
    began_s: float = 0.0,
) -> list[Point]:
    """Return points of ``steps`` steps each; from step ``changed_at`` on the member takes ``ratio`` times as long."""
    number = np.arange(count * steps)
    seconds = np.maximum(0.1, 1 + variation * rng.standard_normal(len(number)))
    seconds *= np.where(number >= changed_at, ratio, 1.0)
    found: list[Point] = []
    for i in range(count):
        part = seconds[i * steps : (i + 1) * steps]
        deviation = float(part.std(ddof=1) / part.mean()) if steps > 1 else variation
        found.append(
            Point(size=100.0, seconds=float(part.mean()), variation=deviation, steps=steps, scraped_s=began_s + i)
        )
    return found


@pytest.mark.parametrize("steps", [1, 5, 10, 30, 100])
@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 0.5, 1 / 1.2])
def test_a_change_is_noticed_in_time(steps: int, ratio: float) -> None:
    """Slower or faster within a scrape: found after 20 full steps or two full scrapes, whichever is longer."""
    rng = np.random.default_rng(steps)
    before = max(8, 200 // steps) if 1 / 1.3 < ratio < 1.3 else max(4, 60 // steps)
    for _ in range(15):
        changed_at = before * steps + int(rng.integers(0, steps))
        first_full = -(-changed_at // steps)
        enough = first_full + max(2, -(-LATEST_STEPS // steps))
        points = scrapes(rng, steps, count=enough, changed_at=changed_at, ratio=ratio, variation=0.05)
        found = changes(points)
        assert found, (steps, ratio)
        assert found[0].first >= before - 2
        assert np.prod([change.ratio for change in found]) == pytest.approx(ratio, rel=0.25)


@pytest.mark.parametrize("steps", [1, 5, 10, 30, 100])
@pytest.mark.parametrize(("ratio", "variation"), [(1.0, 0.1), (1.1, 0.05)])
def test_noise_of_a_tenth_is_not_a_change(steps: int, ratio: float, variation: float) -> None:
    """Neither steps that vary by a tenth nor a lasting tenth is taken for a change of speed."""
    rng = np.random.default_rng(100 + steps)
    for _ in range(20):
        count = max(8, 200 // steps)
        points = scrapes(rng, steps, count=count, changed_at=count * steps // 2, ratio=ratio, variation=variation)
        assert changes(points) == ()


def test_one_slow_scrape_is_not_a_change() -> None:
    """One step of 20 that took 20 times as long has a spread that explains it."""
    rows = [(1.0, 0.03), (1.0, 0.03), (1.95, 2.2), (1.0, 0.03), (1.0, 0.03)]
    assert (
        changes([Point(size=100.0, seconds=s, variation=v, steps=20, scraped_s=i) for i, (s, v) in enumerate(rows)])
        == ()
    )


def test_recovery_is_a_change_back() -> None:
    """Throttled for a while: two changes whose ratios cancel."""
    rng = np.random.default_rng(9)
    points = scrapes(rng, 20, count=6, changed_at=60, ratio=2.0, variation=0.03)
    points += scrapes(rng, 20, count=4, changed_at=0, ratio=1.0, variation=0.03, began_s=6.0)
    first, second = changes(points)
    assert (first.first, second.first) == (3, 6)
    assert first.ratio * second.ratio == pytest.approx(1.0, rel=0.05)


def test_another_share_is_not_a_change() -> None:
    """Twice the share takes longer: the line explains it, even before the slope is known."""
    fixed, slope = 0.2, 0.008
    sizes = [100.0] * 4 + [170.0] * 4 + [60.0] * 3
    points = [
        Point(size=x, seconds=fixed + slope * x, variation=0.03, steps=20, scraped_s=i) for i, x in enumerate(sizes)
    ]
    assert changes(points) == ()


@pytest.mark.parametrize("sizes", [[10, 8, 12, 9, 96, 10, 240, 4, 60], [160, 200, 120, 16, 160, 4, 40]])
def test_a_curve_is_not_a_change(sizes: list[int]) -> None:
    """Half idle below 40 samples and linear above: a jump between the two is not a change of speed."""
    points = [
        Point(size=float(x), seconds=max(0.33, 0.0125 * x), variation=0.03, steps=20, scraped_s=float(i))
        for i, x in enumerate(size for size in sizes for _ in range(2))
    ]
    assert changes(points) == ()


def test_a_change_is_noticed_on_a_curve_and_at_another_share() -> None:
    """The share was cut to a third when the member became half as fast; at both shares it was faster before."""
    before = [(10.0, 0.33), (60.0, 0.58), (10.0, 0.33), (60.0, 0.58)]
    points = [
        Point(size=x, seconds=seconds, variation=0.03, steps=20, scraped_s=float(i))
        for i, (x, seconds) in enumerate([*before, (20.0, 0.8), (20.0, 0.8)])
    ]
    (change,) = changes(points)
    assert change.first == len(before)


def noisy(rng: np.random.Generator, count: int, *, variation: float, correlation: float = 0.0) -> np.ndarray:
    """Return relative seconds of steps; each deviation is correlated with the one before."""
    found = rng.standard_normal(count)
    for i in range(1, count):
        found[i] = correlation * found[i - 1] + np.sqrt(1 - correlation**2) * found[i]
    return np.asarray(np.maximum(0.05, 1 + variation * found))


def scraped(seconds: np.ndarray, steps: int) -> list[Point]:
    """Return a point for every so many steps."""
    parts = seconds.reshape(-1, steps)
    return [
        Point(
            size=100.0,
            seconds=float(part.mean()),
            variation=float(part.std(ddof=1) / part.mean()),
            steps=steps,
            scraped_s=float(i),
        )
        for i, part in enumerate(parts)
    ]


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_noise_that_goes_on_is_learned(steps: int) -> None:
    """A correlation of 0.95 moves means of 20 steps by 8 %, here: less than one false change in 1,000 steps."""
    rng = np.random.default_rng(3)
    found = [changes(scraped(noisy(rng, 2000, variation=0.1, correlation=0.95), steps)) for _ in range(6)]
    assert sum(map(len, found)) < 12


@pytest.mark.parametrize(("steps", "most"), [(5, 2.0), (10, 4.0), (20, 1.0)])
def test_a_burst_is_not_a_change(steps: int, most: float) -> None:
    """Five bursts in 1,000 steps, each of 10 steps at 1.5 times: the mean of 20 steps moves, but it does not last.

    Where one burst fills half of two neighbouring scrapes of 10 steps, nothing tells it from a change.
    """
    rng = np.random.default_rng(4)
    alarms = 0
    for _ in range(6):
        seconds = noisy(rng, 2000, variation=0.03)
        for block in range(10):
            begin = block * 200 + int(rng.integers(0, 190))
            seconds[begin : begin + 10] *= 1.5
        alarms += len(changes(scraped(seconds, steps)))
    assert alarms <= most * 12


def test_a_change_that_is_soon_undone_is_a_phase_and_others_last() -> None:
    """Points of ten steps: a phase of 30 steps, a change that lasts, and a slow start of which the end is a change."""
    points = [Point(size=100.0, seconds=1.0, variation=0.05, steps=10, scraped_s=float(i)) for i in range(60)]
    ends = PaceChange(first=4, ratio=0.7)
    phase = (PaceChange(first=20, ratio=1.3), PaceChange(first=23, ratio=0.79))
    stays = PaceChange(first=40, ratio=1.3)
    assert without_phases((ends, *phase, stays), points) == ((ends, stays), (SpeedPhase(first=20, end=23, ratio=1.3),))
    late = (stays, PaceChange(first=53, ratio=0.77))
    assert without_phases(late, points) == (late, ()), "130 steps are more than a phase"
    other = (PaceChange(first=20, ratio=1.3), PaceChange(first=23, ratio=0.9))
    assert without_phases(other, points) == (other, ())


@pytest.mark.parametrize(("began", "ratio", "is_one"), [(55, 1.32, True), (52, 1.32, False), (55, 1.6, False)])
def test_a_change_like_earlier_phases_is_one_until_it_has_lasted_longer(began: int, ratio: float, is_one: bool) -> None:
    """Two phases of 30 and 20 steps; a third one has begun 50 or 80 steps ago."""
    points = [Point(size=100.0, seconds=1.0, variation=0.05, steps=10, scraped_s=float(i)) for i in range(60)]
    moves = [PaceChange(first=10, ratio=1.3), PaceChange(first=13, ratio=0.77)]
    moves += [PaceChange(first=30, ratio=1.3), PaceChange(first=32, ratio=0.77)]
    last = PaceChange(first=began, ratio=ratio)
    lasting, phases = without_phases([*moves, last], points)
    assert (lasting == ()) == is_one
    assert len(phases) == 2 + is_one
    assert without_phases([*moves[:2], last], points)[0] == (last,), "one phase is no habit"
