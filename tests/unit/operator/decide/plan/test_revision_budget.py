"""The budget of revisions: a burst, then one for each interval."""

from __future__ import annotations

from heterotrain_operator.decide.plan.revision import BURST, INTERVAL_S, RevisionBudget
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(min_value=0.0, max_value=100.0), max_size=100))
def test_no_order_of_requests_gets_more_than_the_burst_and_one_for_each_interval(pauses_s: list[float]) -> None:
    budget, now_s, written = RevisionBudget(), 0.0, 0
    for pause_s in pauses_s:
        now_s += pause_s
        if budget.wait_s(now_s) == 0.0:
            budget, written = budget.spent(now_s), written + 1
    assert written <= BURST + now_s / INTERVAL_S + 1e-6


def test_after_the_wait_a_revision_is_allowed() -> None:
    budget = RevisionBudget()
    for _ in range(BURST):
        assert budget.wait_s(5.0) == 0.0
        budget = budget.spent(5.0)
    assert budget.wait_s(5.0) == INTERVAL_S
    assert budget.wait_s(5.0 + INTERVAL_S) == 0.0
