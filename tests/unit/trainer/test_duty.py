"""Telemetry keeps to its part of the time by itself."""

from __future__ import annotations

import math

from heterotrain.telemetry.duty import BUDGET_RATIO, MOST_EVERY, Duty, every
from hypothesis import given
from hypothesis import strategies as st


@given(step_s=st.floats(1e-4, 10.0), always_s=st.floats(0.0, 1e-3), further_s=st.floats(0.0, 1.0))
def test_the_budget_is_kept_and_nothing_is_given_away(step_s: float, always_s: float, further_s: float) -> None:
    """The least power of two that keeps to the budget, found by trying all."""

    def fits(n: int) -> bool:
        return always_s + further_s / n <= BUDGET_RATIO * step_s * (1 + 1e-9)

    n = every(step_s=step_s, always_s=always_s, measured_s=always_s + further_s)
    powers = [1 << k for k in range(int(math.log2(MOST_EVERY)) + 1)]
    wanted = next((power for power in powers if fits(power)), MOST_EVERY)
    assert (
        n == wanted
        or (further_s < 1e-12 and n == 1)
        or math.isclose(  # on the edge of rounding
            always_s + further_s / min(n, wanted), BUDGET_RATIO * step_s, rel_tol=1e-6
        )
    )


def test_a_rank_finds_how_often_it_can_afford_to_measure() -> None:
    """Steps of 10 ms, 10 us of telemetry in each and 180 us more where all is measured: of 50 us, 40 are left, so every eighth."""
    duty, n, spent_s = Duty(), 1, []
    for number in range(400):
        measured = number % n == 0
        spent_s.append(1.9e-4 if measured else 1e-5)
        duty.spent(spent_s[-1], step_s=0.01, measured=measured)
        n = duty.wanted_every
    assert n == 8
    assert sum(spent_s[-80:]) <= BUDGET_RATIO * 80 * 0.01
    assert math.isclose(duty.spent_s, sum(spent_s), rel_tol=1e-12)
    for number in range(4000):  # steps become long: it looks at every one again
        duty.spent(1.9e-4 if number % n == 0 else 1e-5, step_s=1.0, measured=number % n == 0)
        n = duty.wanted_every
    assert n == 1
