"""All ranks derive the same decision from the control vector."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import pytest
from heterotrain.network.control import AFTER, BEFORE, HEADER, Slot, Squares, StepDecision, decide, to_row
from hypothesis import given
from hypothesis import strategies as st


def a_slot(**fields: Any) -> Slot:
    """Return the slot of an undisturbed rank."""
    plain = {
        "vote": True, "steps": 5, "generation": 2, "revision": 7, "plan_bytes": 100, "plan_checksum": 4_000_000_000,
        "leaving": False, "weight": 4.0, "loss_sum": 8.0,
        "plain": Squares(weighted=1.0, groups=2, total=0.5), "buckets_s": (0.1, 0.2),
    }  # fmt: skip
    return Slot(**(plain | fields))


def of(*slots: Slot) -> StepDecision:
    """Return the decision of these slots."""
    return decide([to_row(slot) for slot in slots])


def test_undisturbed() -> None:
    """The step is committed; weights and losses are added up."""
    assert of(a_slot(), a_slot(weight=2.0, loss_sum=1.0)) == StepDecision(
        committed=True, newest=(2, 7), holder=0, plan_bytes=100, all_hold=True, leaving=(), weight=6.0, loss=1.5,
        weights=(4.0, 2.0), plain=(Squares(weighted=1.0, groups=2, total=0.5),) * 2, preconditioned=(),
        fingerprints=(math.nan, math.nan),
        buckets_s=(0.1, 0.2),
    )  # fmt: skip
    assert len(to_row(a_slot())) == HEADER + 2


def test_squares_are_known_of_all_ranks_or_of_none() -> None:
    """Ranks differ in their squares; a rank without samples has no group; one that did not measure ends it."""
    first, second = Squares(weighted=1.0, groups=2, total=0.5), Squares(weighted=3.0, groups=1, total=0.5)
    none, unknown = Squares(weighted=0.0, groups=0, total=0.5), Squares()
    slots = [a_slot(plain=squares) for squares in (first, second, none)]
    assert of(*slots).plain == (first, second, none)
    assert of(*slots, a_slot(plain=unknown)).plain == ()


def test_all_measure_as_rarely_as_the_rarest_requested() -> None:
    """Squared norms belong to the same step on every rank, or exist on none."""
    assert of(a_slot(measure_every=2), a_slot(measure_every=16), a_slot()).measure_every == 16


def test_one_vote_against_repeats_the_step() -> None:
    """A step is committed by all ranks or by none."""
    assert not of(a_slot(), a_slot(vote=False)).committed


def test_ranks_at_different_steps_do_not_commit() -> None:
    """Their gradients belong to different batches."""
    assert not of(a_slot(), a_slot(steps=6)).committed


def test_one_rank_ends_the_training_of_all() -> None:
    """After the step, which is committed; or before it, so that it is not."""
    after, before = of(a_slot(), a_slot(ends=AFTER)), of(a_slot(ends=BEFORE, vote=False), a_slot(ends=AFTER))
    assert (after.committed, after.ends) == (True, AFTER)
    assert (before.committed, before.ends) == (False, BEFORE)
    assert not of(a_slot(), a_slot(ends=BEFORE)).committed
    assert of(a_slot()).ends == 0.0


def test_the_newest_plan_has_a_holder() -> None:
    """The lowest rank with the highest (generation, revision) sends it when a rank lacks it."""
    found = of(
        a_slot(),
        a_slot(revision=8, plan_bytes=120),
        a_slot(revision=8, plan_bytes=120),
        a_slot(generation=1, revision=9),
    )
    assert (found.newest, found.holder, found.plan_bytes, found.all_hold) == ((2, 8), 1, 120, False)


def test_equal_versions_with_different_bytes_are_sent_again() -> None:
    """A different checksum is a disagreement, even with the same version."""
    assert not of(a_slot(), a_slot(plan_checksum=1)).all_hold


def test_who_leaves() -> None:
    """By rank in the group."""
    assert of(a_slot(), a_slot(leaving=True), a_slot(leaving=True)).leaving == (1, 2)


def test_who_waits_for_a_plan_without_it() -> None:
    """Nobody waits for those who go: once one rank leaves, or all have to, all that have to do."""
    found = of(a_slot(), a_slot(waiting=True), a_slot(waiting=True))
    assert (found.leaving, found.waiting) == ((), (1, 2))
    found = of(a_slot(), a_slot(waiting=True), a_slot(leaving=True))
    assert (found.leaving, found.waiting) == ((1, 2), ())
    assert of(a_slot(waiting=True), a_slot(waiting=True)).leaving == (0, 1)
    assert of(a_slot(leaving=True, waiting=True), a_slot()).leaving == (0,)


def test_buckets_are_minima_over_ranks() -> None:
    """An early rank's time is mostly waiting; if one rank's times are unknown, so is the result."""
    assert of(a_slot(), a_slot(buckets_s=(0.3, 0.05))).buckets_s == (0.1, 0.05)
    assert of(a_slot(), a_slot(buckets_s=(math.nan, math.nan))).buckets_s == ()


@pytest.mark.parametrize(("weight", "loss_sum", "expected"), [(0.0, 0.0, 2.0), (1.0, math.nan, None)])
def test_loss_of_ranks_without_samples(weight: float, loss_sum: float, expected: float | None) -> None:
    """A rank without samples does not affect the loss; a NaN loss is not hidden."""
    assert of(a_slot(), replace(a_slot(), weight=weight, loss_sum=loss_sum)).loss == expected


def test_losses_that_are_not_finite_name_their_ranks() -> None:
    """A rank without weight has no loss; infinities of both signs and sums beyond float64 are no crash."""
    found = of(a_slot(), a_slot(loss_sum=math.nan), a_slot(loss_sum=math.inf), a_slot(weight=0.0, loss_sum=math.nan))
    assert (found.loss, found.non_finite) == (None, (1, 2))
    assert of(a_slot(loss_sum=math.inf), a_slot(loss_sum=-math.inf)).non_finite == (0, 1)
    assert of(a_slot(loss_sum=1e308), a_slot(loss_sum=1e308)).non_finite == (0, 1)
    assert of(a_slot(weight=0.0, loss_sum=0.0)).loss is None


@given(st.data())
def test_parameters_that_no_rank_has_used(data: st.DataObject) -> None:
    """The intersection of the ranks' sets, for any number of parameters."""
    parameters = data.draw(st.integers(0, 200))
    sets = data.draw(st.lists(st.integers(0, (1 << parameters) - 1), min_size=1, max_size=4))
    rows = [to_row(a_slot(unused=unused, parameters=parameters)) for unused in sets]
    found = decide(rows, parameters=parameters)
    assert (found.unused, found.buckets_s) == (reduce(and_, sets), (0.1, 0.2))
