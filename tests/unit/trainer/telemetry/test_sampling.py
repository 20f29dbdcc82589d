"""Telemetry keeps within its budget of time."""

from __future__ import annotations

import math
import random

import pytest
from heterotrain.telemetry.sampling import BUDGET_RATIO, MOST_EVERY, MeasuringBudget, is_measured, measuring_interval
from hypothesis import given
from hypothesis import strategies as st


@given(step_s=st.floats(1e-4, 10.0), always_s=st.floats(0.0, 1e-3), further_s=st.floats(0.0, 1.0))
def test_the_budget_is_kept_and_used(step_s: float, always_s: float, further_s: float) -> None:
    """The interval is the smallest power of two within the budget, as found by trying all of them."""

    def fits(n: int) -> bool:
        return always_s + further_s / n <= BUDGET_RATIO * step_s * (1 + 1e-9)

    n = measuring_interval(step_s=step_s, always_s=always_s, measured_s=always_s + further_s)
    powers = [1 << k for k in range(int(math.log2(MOST_EVERY)) + 1)]
    wanted = next((power for power in powers if fits(power)), MOST_EVERY)
    assert (
        n == wanted
        or (further_s < 1e-12 and n == 1)
        or math.isclose(  # on the edge of rounding
            always_s + further_s / min(n, wanted), BUDGET_RATIO * step_s, rel_tol=1e-6
        )
    )


def test_a_rank_finds_the_interval_that_it_can_afford() -> None:
    """Every eighth step of 10 ms: of the budget of 50 us, 10 us go into every step, so 40 us are left for 180 us."""
    budget, n, spent_s = MeasuringBudget(), 1, []
    for number in range(400):
        measured = number % n == 0
        spent_s.append(1.9e-4 if measured else 1e-5)
        budget.charge(spent_s[-1], step_s=0.01, measured=measured)
        n = budget.measure_every
    assert n == 8
    assert sum(spent_s[-80:]) <= BUDGET_RATIO * 80 * 0.01
    assert math.isclose(budget.spent_s, sum(spent_s), rel_tol=1e-12)
    for number in range(4000):  # steps become long: every one is measured again
        budget.charge(1.9e-4 if number % n == 0 else 1e-5, step_s=1.0, measured=number % n == 0)
        n = budget.measure_every
    assert n == 1


@pytest.mark.parametrize("n", [1, 2, 8, 256])
def test_one_step_of_each_group_is_measured_at_varying_positions(n: int) -> None:
    """The first steps of epochs of any length are measured as often as any others, within a few per cent."""
    groups = 4096
    measured = [step for step in range(groups * n) if is_measured(step, n)]
    assert [step // n for step in measured] == list(range(groups))
    places = [sum(step % n == place for step in measured) for place in range(n)]
    assert max(places) - min(places) <= 0.1 * groups / n + 4
    for epoch in (n, 64, 100):
        first = sum(is_measured(step, n) for step in range(0, groups * n, epoch))
        assert math.isclose(first, groups / epoch, rel_tol=0.15, abs_tol=4)


def run(*, own_s: float, true_s: float, noise_s: float, first_s: float = 0.0, seed: int = 5) -> tuple[int, float]:
    """Simulate telemetry that costs ``own_s`` by its own clock and ``true_s`` in steps of 100 ms.

    One of 8 steps takes ``first_s`` more. Returns the last n, and the fraction of measured steps.
    """
    budget, chance, count = MeasuringBudget(), random.Random(seed), 0  # noqa: S311  # no secret
    for number in range(4000):
        measured = is_measured(number, budget.measure_every if number >= 64 else 2)
        step_s = 0.1 + chance.gauss(0.0, noise_s) + true_s * measured + first_s * (number % 8 == 0)
        budget.charge(own_s if measured else 0.0, step_s=step_s, measured=measured)
        count += measured
    return budget.measure_every, count / 4000


def test_cost_hidden_from_telemetrys_clock_is_found_in_step_times() -> None:
    """4 ms of 100 ms, of which telemetry's own clock sees 0.4 ms: one step in eight is measured, not each."""
    assert run(own_s=4e-4, true_s=4e-4, noise_s=2e-3)[0] == 1
    assert run(own_s=4e-4, true_s=4e-3, noise_s=0.0)[0] == 8
    assert run(own_s=4e-4, true_s=4e-3, noise_s=2e-3)[0] == 8


@pytest.mark.parametrize("noise_s", [1e-3, 1e-2, 3e-2])
def test_noise_is_not_mistaken_for_a_cost(noise_s: float) -> None:
    """If the own clock sees the whole cost and gives one step in two, nearly as many are measured despite any noise."""
    parts = [run(own_s=8e-4, true_s=8e-4, noise_s=noise_s, seed=seed)[1] for seed in range(8)]
    assert sum(parts) / len(parts) >= 0.35


def test_a_slow_first_step_of_epochs_is_not_mistaken_for_a_measurements_cost() -> None:
    """Epochs have 8 steps, and the first one takes 20 ms longer for another reason."""
    assert run(own_s=1e-3, true_s=1e-3, noise_s=1e-3, first_s=0.02)[0] <= 4
