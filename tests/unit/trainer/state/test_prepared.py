"""The recovery rule of the two phases, for every combination of what ranks may know."""

from __future__ import annotations

from itertools import product

from heterotrain.state.prepared import Confirmation, LastSteps, decide_late

VALUES = Confirmation(2.5, is_finite=True)


def rank(kind: str) -> LastSteps:
    """Return the report of a rank in or after step 7."""
    return {
        "repeats": LastSteps(7),  # it has not finished the first phase, or the step was undone
        "prepared": LastSteps(7, prepared=7, confirmed=6, confirmation=Confirmation(1.0, is_finite=True)),
        "applied": LastSteps(8, confirmed=7, confirmation=VALUES),
        "joins": LastSteps(-1),
        "was away": LastSteps(5, prepared=5, confirmed=4),
    }[kind]


def test_prepared_ranks_finish_the_step_exactly_if_a_rank_has_applied_it() -> None:
    for kinds in product(("repeats", "prepared", "applied", "joins", "was away"), repeat=3):
        found = decide_late([rank(kind) for kind in kinds])
        assert (found == VALUES) is ({"prepared", "applied"} <= set(kinds)), kinds
        assert found in (VALUES, None)


def test_a_rank_that_is_further_ahead_decides_nothing() -> None:
    """It has trained on without this one, so this one takes over its state."""
    ahead = LastSteps(9, confirmed=8, confirmation=VALUES)
    assert decide_late([rank("prepared"), ahead]) is None


def test_a_survivor_of_a_replicated_job_has_no_confirmation() -> None:
    assert decide_late([rank("prepared"), LastSteps(8)]) is None
