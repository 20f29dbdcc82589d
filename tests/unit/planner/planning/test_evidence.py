"""How far a plan relies on a model: trusted shares, and pessimistic lines beyond them."""

from __future__ import annotations

import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember, member_problem, micro_batch_count
from heterotrain_planner.perf.model import FitQuality, LineError, MemberModel, compute_s
from heterotrain_planner.planning.evidence import (
    UNSURE_GROWTH,
    MemberEvidence,
    pessimistic,
    split_member,
    trusted_samples,
)
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(0.0, 2.0)


def modelled(compute: ComputeTime, *, seen: int, slope_error: float | None) -> MemberModel:
    """Return a thin model of this line."""
    error = None if slope_error is None else LineError(centre_samples=seen, centre_s=0.0, slope_s=slope_error)
    return MemberModel(
        compute=compute, error=error, largest_share_samples=seen, quality=FitQuality.THIN, reason="a few steps"
    )


def member_of(compute: ComputeTime, **limits: int | None) -> SplitMember:
    """Return the member of this line."""
    return split_member(MemberEvidence(member="w0/0", **limits), compute)  # type: ignore[arg-type]  # given limits


@given(
    st.builds(
        ComputeTime,
        per_sample_s=st.floats(1e-4, 0.1),
        fixed_s=seconds,
        backward_per_sample_s=st.floats(0.0, 0.1),
        backward_fixed_s=seconds,
        update_s=seconds,
    ),
    st.integers(1, 64),
    st.none() | st.floats(0.0, 0.2),
    st.none() | st.integers(1, 100),
    st.floats(1.0, 8.0),
)
def test_a_pessimistic_line_is_slower_and_sound(
    compute: ComputeTime, seen: int, slope_error: float | None, micro_cap: int | None, growth: float
) -> None:
    """Beyond the observed shares it is never faster than the fitted line, accumulated or not; no part is negative."""
    member = member_of(compute, micro_cap_samples=micro_cap)
    slow = pessimistic(member, modelled(compute, seen=seen, slope_error=slope_error))
    assert member_problem(slow) is None
    assert isinstance(slow.compute, ComputeTime)
    assert slow.cap_samples == UNSURE_GROWTH * seen
    share = round(growth * seen)
    micro_batches = micro_batch_count(share, micro_cap)
    fitted_s = compute_s(compute, share, micro_batches=micro_batches)
    assert compute_s(slow.compute, share, micro_batches=micro_batches) >= fitted_s * (1 - 1e-9)


def test_an_uncertain_slope_is_worth_no_more_than_the_observed_pace() -> None:
    """Without a known error: proportional to the share; with a small one: two standard errors steeper."""
    compute = ComputeTime(per_sample_s=0.01, fixed_s=0.2, backward_per_sample_s=0.02, backward_fixed_s=0.4)
    blind = pessimistic(member_of(compute), modelled(compute, seen=10, slope_error=None)).compute
    assert isinstance(blind, ComputeTime)
    assert compute_s(blind, 40) == pytest.approx(4 * compute_s(compute, 10))
    known = pessimistic(member_of(compute), modelled(compute, seen=10, slope_error=0.005)).compute
    assert isinstance(known, ComputeTime)
    assert compute_s(known, 10) == pytest.approx(compute_s(compute, 10))
    assert compute_s(known, 40) == pytest.approx(compute_s(compute, 40) + 30 * 2 * 0.005)


def test_the_users_cap_holds_and_the_unseen_keep_their_line() -> None:
    """A cap of the user is never exceeded, and nothing is assumed about a member without observations."""
    compute = ComputeTime(per_sample_s=0.01, fixed_s=0.2, backward_per_sample_s=0.02, backward_fixed_s=0.4)
    model = modelled(compute, seen=10, slope_error=None)
    capped = member_of(compute, cap_samples=15)
    assert pessimistic(capped, model).cap_samples == 15
    assert trusted_samples([capped, member_of(compute)], [model, model]) == 15 + 20
    unseen = modelled(compute, seen=0, slope_error=None)
    assert pessimistic(capped, unseen) == capped
