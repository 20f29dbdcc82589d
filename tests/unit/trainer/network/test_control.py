"""All ranks derive the same decision from the rows of a vote."""

from __future__ import annotations

import math
from functools import reduce
from operator import and_

import pytest
from heterotrain.membership.agreement import PLAN, NewestPlan
from heterotrain.network.control import Column, Rows, StepDecision, Tally, one
from heterotrain.numerics.noise import Squares
from heterotrain.steps.columns import AFTER, BEFORE, CHECKPOINT, ENDS, MORE, UNUSED, words
from heterotrain.steps.observer import MEASURED
from hypothesis import given
from hypothesis import strategies as st

COUNTED: list[Rows] = []
"""What the column below was asked to reduce."""


def _spread(rows: Rows) -> float:
    COUNTED.append(rows)
    return max(row[1] for row in rows) - min(row[1] for row in rows)


MOST, SPREAD = Column("most", one(max)), Column("spread", _spread)


def rows_of(*votes: tuple[bool, int, float, float], values: tuple[float, ...] = ()) -> tuple[Tally, list[bytes]]:
    """Return the tally of the last rank, and all rows; ``values`` of ``MOST`` by rank."""
    rows = []
    for number, vote in enumerate(votes):
        tally = Tally((MOST, SPREAD))
        rows.append(tally.row(*vote, [(values[number] if values else 0.0,), (7.0, float(number))]))
    return tally, rows


def of(*votes: tuple[bool, int, float, float]) -> StepDecision:
    """Return the decision of (ok, steps, weight, loss_sum), by rank."""
    tally, rows = rows_of(*votes)
    return tally.decide(rows)


@pytest.mark.parametrize(("other", "committed"), [((True, 5), True), ((False, 5), False), ((True, 6), False)])
def test_all_ranks_commit_the_same_step_or_none_does(other: tuple[bool, int], committed: bool) -> None:  # expected
    found = of((True, 5, 4.0, 8.0), (*other, 2.0, 1.0))
    assert (found.committed, found.weights, found.weight, found.loss) == (committed, (4.0, 2.0), 6.0, 1.5)


def test_columns_are_reduced_by_rank_and_only_when_one_has_changed() -> None:
    """Also one of another rank; the step's own numbers are counted each time."""
    COUNTED.clear()
    votes = ((True, 5, 4.0, 8.0), (True, 5, 2.0, 1.0))
    tally, rows = rows_of(*votes, values=(3.0, 9.0))
    found = tally.decide(rows)
    assert (found.agreed[MOST], found.agreed[SPREAD]) == (9.0, 1.0)
    assert COUNTED == [[[7.0, 0.0], [7.0, 1.0]]]
    assert tally.values(MOST, rows) == [[3.0], [9.0]]
    _, later = rows_of((True, 6, 4.0, 8.0), (True, 6, 2.0, math.nan), values=(3.0, 9.0))
    again = tally.decide(later)
    assert (again.agreed[MOST], again.non_finite, len(COUNTED)) == (9.0, (1,), 1)
    _, changed = rows_of(*votes, values=(12.0, 9.0))
    assert (tally.decide(changed).agreed[MOST], len(COUNTED)) == (12.0, 2)


@pytest.mark.parametrize(
    ("own", "loss", "non_finite"),
    [
        ((0.0, 0.0), 2.0, ()),
        ((0.0, math.nan), 2.0, ()),
        ((1.0, math.nan), None, (1,)),
        ((1.0, math.inf), None, (1,)),
        ((4.0, 1.8e308), None, (1,)),
    ],
)
def test_a_rank_without_weight_has_no_loss_and_one_that_is_not_finite_is_named(
    own: tuple[float, float], loss: float | None, non_finite: tuple[int, ...]
) -> None:
    found = of((True, 5, 4.0, 8.0), (True, 5, *own))
    assert (found.loss, found.non_finite) == (loss, non_finite)


def test_infinities_of_both_signs_and_sums_beyond_float64_are_no_crash() -> None:
    assert of((True, 5, 4.0, math.inf), (True, 5, 4.0, -math.inf)).non_finite == (0, 1)
    assert of((True, 5, 4.0, 1e308), (True, 5, 4.0, 1e308)).non_finite == (0, 1)
    assert of((True, 5, 0.0, 0.0)).loss is None


def test_squares_are_known_of_all_ranks_or_of_none_and_the_rarest_interval_counts() -> None:
    """A rank without samples has no group; one that did not measure ends it. Buckets are minima over ranks."""
    ranks = [(1.0, 2, 0.5), (3.0, 1, 0.5), (0.0, 0, 0.5)]
    rows = [
        (*squares, math.nan, 0, math.nan, every, 0.1 * every, 0.2)
        for squares, every in zip(ranks, (2, 16, 1), strict=True)
    ]
    found = MEASURED.reduction(rows)
    assert found.plain == tuple(Squares(weighted=w, groups=g, total=t) for w, g, t in ranks)
    assert (found.preconditioned, found.every, found.buckets_s) == ((), 16, (0.1, 0.2))
    unknown = MEASURED.reduction([*rows, (math.nan, 0, math.nan, math.nan, 0, math.nan, 1, math.nan, math.nan)])
    assert (unknown.plain, unknown.buckets_s) == ((), ())


def test_the_newest_plan_has_a_holder() -> None:
    """The lowest rank with the highest version sends it when a rank lacks it, or has other bytes of that version."""
    old, new = (2.0, 7.0, 100.0, 4e9), (2.0, 8.0, 120.0, 5e9)
    assert PLAN.reduction([old, new, new, (1.0, 9.0, 90.0, 1.0)]) == NewestPlan((2, 8), 1, 120, all_hold=False)
    assert PLAN.reduction([old, old]).all_hold
    assert not PLAN.reduction([old, (2.0, 7.0, 100.0, 1.0)]).all_hold


def test_one_rank_ends_the_training_of_all_and_one_proposes_a_checkpoint() -> None:
    assert ENDS.reduction([(0.0,), (AFTER,)]) == AFTER
    assert ENDS.reduction([(BEFORE,), (AFTER,)]) == BEFORE
    assert CHECKPOINT.reduction([(0.0, 77.0), (1.0, 0.0)]) == (True, 77)
    assert not CHECKPOINT.reduction([(0.0, 77.0), (0.0, 0.0)]).is_due
    assert [MORE.reduction([(1.0,), (other,)]) for other in (1.0, 0.0)] == [True, False]


@given(st.data())
def test_parameters_that_no_rank_has_used(data: st.DataObject) -> None:
    """The intersection of the ranks' sets, for any number of parameters."""
    parameters = data.draw(st.integers(0, 200))
    sets = data.draw(st.lists(st.integers(0, (1 << parameters) - 1), min_size=1, max_size=4))
    assert UNUSED.reduction([words(unused, parameters) for unused in sets]) == reduce(and_, sets)
