"""Ceiling and predicted step under noise that goes on, is skewed or has rare long steps: against drawn steps.

Steps are drawn here, told to the decision as scrapes, and a much longer run of the same noise has the truth. The
figures of docs/mathematics.md come from these cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import Prediction
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.expected_maximum import Derivatives, derivatives, expected_maximum
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from heterotrain_planner.split.expected import efficiency_ceiling
from support.repeat import times

MEMBERS = 3
STEPS = 600


@dataclass(frozen=True)
class Noise:
    """Noise of single steps: its kind, deviation, correlation from step to step, and a deviation that all share."""

    kind: str
    deviation: float
    correlation: float = 0.0
    shared: float = 0.0

    def draw(self, steps: int, rng: np.random.Generator) -> np.ndarray:
        """Return relative times of each step and member, without the shared part."""
        z = rng.standard_normal((steps, MEMBERS))
        if self.correlation:
            for step in range(1, steps):
                z[step] = self.correlation * z[step - 1] + math.sqrt(1 - self.correlation**2) * z[step]
        if self.kind == "log-normal":
            sigma = math.sqrt(math.log1p(self.deviation**2))
            return np.exp(sigma * z - sigma**2 / 2)
        times = 1 + self.deviation * z
        return np.where(rng.random(times.shape) < 0.01, 3 * times, times) if self.kind == "hiccups" else times


def told(times: np.ndarray, scrape: int) -> tuple[MemberEvidence, ...]:
    """Return the members' evidence: means and variances of ``scrape`` steps each, as counters give them."""

    def spread(values: np.ndarray) -> MeanVariance:
        return MeanVariance(mean=float(values.mean()), variance=float(values.var(ddof=1)))

    step, zero = times.max(axis=1), MeanVariance(mean=0.0, variance=0.0)
    found: list[list[Observation]] = [[] for _ in range(MEMBERS)]
    for begin in range(0, len(times) - scrape + 1, scrape):
        rows = slice(begin, begin + scrape)
        for rank in range(MEMBERS):
            own = times[rows, rank]
            found[rank].append(
                Observation(
                    member=f"m{rank}",
                    share_samples=100,
                    steps=scrape,
                    ended_s=float(step[: begin + scrape].sum()),
                    load=zero,
                    forward=spread(own / 3),
                    backward=spread(own * 2 / 3),
                    compute=spread(own),
                    sync=spread(step[rows] - own),
                    step=spread(step[rows]),
                    update=zero,
                )
            )
    return tuple(MemberEvidence(member=f"m{rank}", observations=tuple(o)) for rank, o in enumerate(found))


def predicted(noise: Noise, scrape: int, rng: np.random.Generator) -> Prediction:
    """Return the decision's prediction for balanced members after 600 steps."""
    times = noise.draw(STEPS, rng) * (1 + noise.shared * rng.standard_normal((STEPS, 1)))
    members = told(times, scrape)
    request = SharesRequest(total_samples=100 * MEMBERS, members=members, current_shares=(100,) * MEMBERS)
    decision = decide_shares(request)
    assert isinstance(decision, SharesDecision)
    assert decision.prediction is not None
    return decision.prediction


@pytest.mark.parametrize(
    ("noise", "scrape", "ceiling_error", "step_error"),
    [
        (Noise("normal", 0.1), 10, 0.003, 0.01),
        (Noise("log-normal", 0.1), 10, 0.005, 0.01),
        (Noise("log-normal", 0.3), 10, 0.015, 0.02),
        (Noise("normal", 0.1, correlation=0.5), 3, 0.006, 0.01),
        (Noise("normal", 0.1, correlation=0.8), 3, 0.010, 0.015),
        (Noise("normal", 0.1, correlation=0.8), 20, 0.010, 0.015),
        (Noise("normal", 0.1, correlation=0.95), 3, 0.020, 0.03),
        (Noise("hiccups", 0.03), 3, 0.015, 0.02),
        (Noise("hiccups", 0.03), 10, 0.012, 0.02),
        (Noise("hiccups", 0.03), 20, 0.012, 0.02),
        (Noise("normal", 0.04, shared=0.1), 3, 0.006, 0.015),
        (Noise("normal", 0.04, shared=0.1), 20, 0.006, 0.015),
    ],
    ids=str,
)
def test_the_prediction_is_that_of_drawn_steps(
    noise: Noise, scrape: int, ceiling_error: float, step_error: float
) -> None:
    rng = np.random.default_rng(1)
    long = noise.draw(40_000, rng)
    step_s = float(long.max(axis=1).mean())
    found = [predicted(noise, scrape, rng) for _ in range(6)]
    ceiling = float(np.mean([each.efficiency_ceiling for each in found]))
    assert ceiling == pytest.approx(float(long.mean()) / step_s, abs=ceiling_error)
    assert float(np.mean([each.step_s for each in found])) == pytest.approx(step_s, rel=step_error)


def test_a_broken_scrape_is_not_noise() -> None:
    """One scrape with a variance that no step can have leaves the ceiling where it was."""
    times = Noise("normal", 0.05).draw(STEPS, np.random.default_rng(2))
    members = told(times, 10)
    broken = list(members[0].observations)
    broken[30] = Observation(
        member="m0", share_samples=100, steps=10, ended_s=broken[30].ended_s, compute=MeanVariance(mean=1, variance=90)
    )
    ceilings = []
    for evidence in (members, (MemberEvidence(member="m0", observations=tuple(broken)), *members[1:])):
        request = SharesRequest(total_samples=300, members=evidence, current_shares=(100, 100, 100))
        decision = decide_shares(request)
        assert isinstance(decision, SharesDecision)
        assert decision.prediction is not None
        ceilings.append(decision.prediction.efficiency_ceiling)
    assert ceilings[1] == pytest.approx(ceilings[0], abs=0.02)


def long_steps(mean: np.ndarray, deviation: np.ndarray, hiccups: Hiccups, steps: int, seed: int) -> np.ndarray:
    """Return drawn times with the given means: long steps are longer by the ratio of the mean."""
    rng = np.random.default_rng(seed)
    long = rng.random((steps, len(mean))) < hiccups.rate
    own = mean * (1 + hiccups.ratio * (long - hiccups.rate))
    times: np.ndarray = own + deviation * rng.standard_normal((steps, len(mean)))
    return times


@pytest.mark.parametrize("seed", range(times(gate=6, every=120)))
def test_the_mean_of_a_maximum_with_long_steps_matches_draws(seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = int(rng.integers(2, 12))
    mean, deviation = rng.uniform(0.5, 1.5, members), rng.uniform(0.001, 0.2, members)
    hiccups = Hiccups(rate=float(rng.uniform(0.002, 0.2)), ratio=float(rng.uniform(0.1, 5)))
    drawn = long_steps(mean, deviation, hiccups, 100_000, seed).max(axis=1)
    found = expected_maximum(mean.tolist(), deviation.tolist(), hiccups=hiccups)
    assert found == pytest.approx(float(drawn.mean()), abs=4.5 * float(drawn.std()) / math.sqrt(len(drawn)))


def test_derivatives_with_long_steps_are_those_of_differences() -> None:
    shares, slope = np.array([1.0, 0.9, 1.1]), np.array([1.0, 1.2, 0.8])
    hiccups, width = Hiccups(rate=0.05, ratio=1.5), 1e-3

    def at(b: np.ndarray) -> Derivatives:
        return derivatives(b * slope, 0.1 * b * slope, slope, 0.1 * slope, hiccups=hiccups)

    found = at(shares)
    second = np.diag(found.diagonal_W) - found.factor_WX @ found.factor_WX.T
    for i, unit in enumerate(np.eye(3)):
        above, below = at(shares + width * unit), at(shares - width * unit)
        assert found.gradient_W[i] == pytest.approx((above.value - below.value) / 2 / width, rel=1e-3)
        assert second[i] == pytest.approx((above.gradient_W - below.gradient_W) / 2 / width, rel=5e-3, abs=1e-3)


@pytest.mark.parametrize("seed", range(times(gate=4, every=80)))
def test_no_shares_exceed_the_ceiling_with_long_steps(seed: int) -> None:
    """Random shares, judged by drawn steps, stay below it."""
    rng = np.random.default_rng(seed)
    members = int(rng.integers(2, 9))
    rates, variations = rng.uniform(0.5, 2, members), rng.uniform(0.01, 0.3, members)
    hiccups = Hiccups(rate=0.02, ratio=2.0)
    ceiling = efficiency_ceiling(variations.tolist(), rates.tolist(), hiccups=hiccups)
    for _ in range(10):
        mean = rng.uniform(0.7, 1.3, members) ** rng.uniform(0, 1)
        drawn = long_steps(mean, variations * mean, hiccups, 20_000, seed).max(axis=1)
        efficiency = float((rates * mean).sum() / rates.sum() / drawn.mean())
        assert efficiency <= ceiling + 4 * float(drawn.std()) / math.sqrt(len(drawn))
