"""What holds for every split, whatever the members."""

from __future__ import annotations

import random

import pytest
from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible, Split, balance, evaluate, evenly, in_proportion
from heterotrain_core.split.member import CurveTime, SplitMember, TableTime
from heterotrain_planner.split.straggler import find_stragglers
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.core.oracles import a_problem, allowed_shares, member_step_s, step_s

seconds = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5]) | st.floats(0, 1, allow_subnormal=False)
models = st.builds(
    ComputeTime,
    per_sample_s=st.floats(1e-4, 1),
    fixed_s=seconds,
    backward_per_sample_s=seconds,
    backward_fixed_s=seconds,
    update_s=seconds,
)
members = st.builds(
    SplitMember,
    compute=models,
    floor_samples=st.integers(0, 3),
    cap_samples=st.none() | st.integers(3, 60),
    micro_cap_samples=st.none() | st.integers(1, 20),
)
exchanges = st.builds(CommunicationTime, overlapped_s=seconds, last_bucket_s=seconds, gamma=st.floats(0, 1))


@given(st.integers(1, 150), st.lists(members, min_size=1, max_size=6), exchanges)
def test_shares_keep_their_limits_and_no_single_move_helps(
    total: int, some: list[SplitMember], exchange: CommunicationTime
) -> None:
    """Shares sum to the batch within limits, and no sample moved from one member to another shortens the step."""
    found = balance(total, some, communication=exchange)
    if isinstance(found, Infeasible):
        least = sum(m.floor_samples for m in some)
        most = sum(total if m.cap_samples is None else m.cap_samples for m in some)
        assert total < least or total > most
        assert found.limit in (least, most)
        return
    assert sum(found.shares) == total
    assert all(n in allowed_shares(m, total) for m, n in zip(some, found.shares, strict=True))
    for giver in range(len(some)):
        for taker in range(len(some)):
            moved = list(found.shares)
            moved[giver] -= 1
            moved[taker] += 1
            if all(n in allowed_shares(m, total) for m, n in zip(some, moved, strict=True)):
                assert step_s(some, moved, exchange) >= found.step_s * (1 - 1e-12)
    assert 0 < found.efficiency <= 1 + 1e-12
    assert found.solo_samples_per_s == pytest.approx(
        sum(n / own for n, own in zip(found.shares, found.own_s, strict=True) if n), rel=1e-12
    )


@given(st.integers(1, 100), st.lists(members, min_size=2, max_size=5), exchanges, st.permutations(range(5)))
def test_permuting_members_permutes_shares(
    total: int, some: list[SplitMember], exchange: CommunicationTime, places: list[int]
) -> None:
    """Nobody's rank matters, but where two members would be ready at the same time."""
    order = [i for i in places if i < len(some)]
    one = balance(total, some, communication=exchange)
    other = balance(total, [some[i] for i in order], communication=exchange)
    if isinstance(one, Infeasible):
        assert one == other
        return
    assert isinstance(other, Split)
    assert one.step_s == other.step_s
    ready = [
        {member_step_s(m, n, exchange), member_step_s(m, n + 1, exchange)}
        for m, n in zip(some, one.shares, strict=True)
    ]
    assume(all(not (a & b) for i, a in enumerate(ready) for b in ready[:i]))
    assert tuple(one.shares[i] for i in order) == other.shares


@given(st.integers(2, 150), models, st.integers(1, 6), exchanges)
def test_equal_members_share_evenly(total: int, model: ComputeTime, count: int, exchange: CommunicationTime) -> None:
    """Identical members get even shares, and the rest goes to the lowest ranks."""
    assume(total >= count)
    found = balance(total, [SplitMember(compute=model)] * count, communication=exchange)
    assert isinstance(found, Split)
    assert found.shares == evenly(total, count)


@given(st.integers(2, 150), models, st.lists(models, max_size=3), st.floats(1.01, 5), exchanges)
def test_a_strictly_faster_member_never_gets_less(  # hypothesis passes them by place
    total: int, model: ComputeTime, others: list[ComputeTime], factor: float, exchange: CommunicationTime
) -> None:
    """A member that is slower in every part never gets a larger share."""
    assume(total >= 2 + len(others))
    slow = ComputeTime(
        per_sample_s=model.per_sample_s * factor,
        fixed_s=model.fixed_s * factor,
        backward_per_sample_s=model.backward_per_sample_s,
        backward_fixed_s=model.backward_fixed_s,
        update_s=model.update_s,
    )
    found = balance(total, [SplitMember(compute=c) for c in (slow, model, *others)], communication=exchange)
    assert isinstance(found, Split)
    assert found.shares[1] >= found.shares[0]


@given(st.lists(members, min_size=1, max_size=5), exchanges, st.integers(1, 100))
def test_a_larger_batch_never_takes_less_time(some: list[SplitMember], exchange: CommunicationTime, total: int) -> None:
    """T(B) never falls with B."""
    one, more = (balance(t, some, communication=exchange) for t in (total, total + 1))
    if isinstance(one, Split) and isinstance(more, Split):
        assert more.step_s >= one.step_s


@given(st.integers(1, 150), st.lists(members, min_size=1, max_size=5))
def test_without_exchange_members_are_bound_by_compute_or_a_limit(total: int, some: list[SplitMember]) -> None:
    """Ties count as compute, so nothing is ever bound by an exchange that costs nothing."""
    found = balance(total, some)
    if isinstance(found, Split):
        assert Binding.COMMUNICATION not in found.bindings


def test_bindings_show_what_would_help() -> None:
    """A limit binds exactly when moving it by one sample would shorten the step or lighten the slowest."""
    rng = random.Random(11)
    met = set()
    for _ in range(800):
        total, some, exchange = a_problem(rng)
        if any(isinstance(m.compute, TableTime) or m.granularity_samples > 1 for m in some):
            continue
        found = balance(total, some, communication=exchange)
        if isinstance(found, Infeasible):
            continue
        for i, (member, share, binding) in enumerate(zip(some, found.shares, found.bindings, strict=True)):
            met.add(binding)
            could_take_more = member_step_s(member, share + 1, exchange) < found.step_s * (1 - 1e-12)
            if binding is Binding.MEMORY:
                assert share == member.cap_samples
                assert could_take_more
            elif binding is Binding.FLOOR:
                assert share == member.floor_samples
                others = [
                    member_step_s(m, n + 1, exchange)
                    for j, (m, n) in enumerate(zip(some, found.shares, strict=True))
                    if j != i and n + 1 in allowed_shares(m, total)
                ]
                assert share == 0 or min(others) < member_step_s(member, share, exchange)
            else:
                assert share != member.cap_samples or not could_take_more
    assert met == set(Binding) - {Binding.FILL}, "the fill binds pipelines only, which another planner divides"


def test_equal_members_at_their_floors_are_bound_by_compute() -> None:
    """Where moving a sample would not improve anything, no limit binds: ties count as compute."""
    one = ComputeTime(per_sample_s=0.1, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    flat = TableTime(points=((1, 1.0), (9, 1.0)))
    for some in ([SplitMember(compute=one)] * 3, [SplitMember(compute=flat)] * 3):
        found = balance(3, some)
        assert isinstance(found, Split)
        assert (found.shares, set(found.bindings)) == ((1, 1, 1), {Binding.COMPUTE})


def test_a_table_is_linear_between_points_and_ends_at_the_last() -> None:
    """The curve is the measured one: no share beyond its end, flat below its start, and it may fall."""
    falling = TableTime(points=((2, 1.0), (4, 3.0), (8, 1.5)))
    slow = ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    found = balance(10, [SplitMember(compute=falling), SplitMember(compute=slow)])
    assert isinstance(found, Split)
    assert (found.shares, found.step_s) == ((8, 2), 2.0)
    found = balance(4, [SplitMember(compute=falling), SplitMember(compute=slow)])
    assert isinstance(found, Split)
    assert found.step_s == 2.0
    refused = balance(20, [SplitMember(compute=falling), SplitMember(compute=falling)])
    assert refused == Infeasible(
        reason="the global batch of 20 is above 16, the sum of the largest shares: use more members or a smaller batch",
        limit=16,
    )
    exact = balance(16, [SplitMember(compute=falling)] * 2, communication=CommunicationTime(last_bucket_s=0.5))
    assert isinstance(exact, Split)
    assert (exact.step_s, exact.bindings) == (2.0, (Binding.COMPUTE, Binding.COMPUTE))


@pytest.mark.parametrize(
    ("total", "member", "words"),
    [
        (0, SplitMember(compute=TableTime(points=((1, 1.0),))), "at least 1"),
        (4, SplitMember(compute=TableTime(points=())), "empty table"),
        (4, SplitMember(compute=TableTime(points=((2, 1.0), (2, 2.0)))), "do not grow"),
        (4, SplitMember(compute=TableTime(points=((2, 0.0),))), "not positive"),
        (
            4,
            SplitMember(
                compute=ComputeTime(per_sample_s=float("nan"), fixed_s=0, backward_per_sample_s=0, backward_fixed_s=0)
            ),
            "negative or infinite",
        ),
        (
            4,
            SplitMember(compute=ComputeTime(per_sample_s=0, fixed_s=0, backward_per_sample_s=0, backward_fixed_s=0)),
            "without any time",
        ),
        (
            4,
            SplitMember(compute=TableTime(points=((8, 1.0),)), floor_samples=3, granularity_samples=4, cap_samples=3),
            "needs at least 3",
        ),
        (4, SplitMember(compute=CurveTime(points=(), backward_part=0.5)), "empty time curve"),
        (4, SplitMember(compute=CurveTime(points=((2, 1.0), (2, 2.0)), backward_part=0.5)), "do not grow"),
        (4, SplitMember(compute=CurveTime(points=((2, 1.0), (3, 0.9)), backward_part=0.5)), "that falls"),
        (4, SplitMember(compute=CurveTime(points=((2, 0.0), (3, 0.9)), backward_part=0.5)), "not positive"),
        (4, SplitMember(compute=CurveTime(points=((2, 1.0),), backward_part=1.1)), "not in [0, 1]"),
        (4, SplitMember(compute=CurveTime(points=((2, 1.0),), backward_part=1.0, update_s=-1.0)), "negative update"),
        (4, SplitMember(compute=TableTime(points=((8, 1.0),)), granularity_samples=3), "multiple of the granularity 3"),
        (4, SplitMember(compute=TableTime(points=((8, 1.0),)), granularity_samples=0), "granularity of 0"),
        (4, SplitMember(compute=TableTime(points=((8, 1.0),)), micro_cap_samples=0), "micro-batch cap of 0"),
        (4, SplitMember(compute=TableTime(points=((8, 1.0),)), floor_samples=-1), "negative floor"),
    ],
)
def test_infeasible_batches_have_a_reason(total: int, member: SplitMember, words: str) -> None:
    """Infeasible is a value with one clear sentence."""
    found = balance(total, [member])
    assert isinstance(found, Infeasible)
    assert words in found.reason


def test_no_members_and_a_broken_exchange_are_refused() -> None:
    """No members, and an invalid exchange, also return values."""
    one = SplitMember(compute=TableTime(points=((8, 1.0),)))
    assert isinstance(balance(4, []), Infeasible)
    assert isinstance(balance(4, [one], communication=CommunicationTime(gamma=1.5)), Infeasible)
    assert isinstance(balance(4, [one], communication=CommunicationTime(overlapped_s=-1)), Infeasible)


def test_given_shares_are_evaluated_or_refused() -> None:
    """Any legal division is priced; one that breaks a limit is not."""
    some = [
        SplitMember(compute=TableTime(points=((1, 1.0), (9, 9.0)))),
        SplitMember(compute=TableTime(points=((1, 2.0), (9, 18.0))), cap_samples=4),
    ]
    priced = evaluate((5, 4), some)
    assert isinstance(priced, Split)
    assert (priced.step_s, priced.member_s) == (8.0, (5.0, 8.0))
    for shares in ((4, 5), (9, 0), (9,), (12, 1)):
        assert isinstance(evaluate(shares, some), Infeasible)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_proportion_is_exact_fair_and_stable(total: int, shares: list[int]) -> None:
    """Whole samples that sum up, each within one of its quota, and the shares themselves when nothing changes."""
    found = in_proportion(total, shares)
    assert sum(found) == total
    whole = sum(shares)
    if whole:
        assert all(abs(n * whole - total * share) < whole for n, share in zip(found, shares, strict=True))
        assert in_proportion(whole, shares) == tuple(shares)
    else:
        assert found == evenly(total, len(shares))


@pytest.mark.parametrize("broken", [(), (-1, 2)])
def test_proportion_of_invalid_shares_is_an_error(broken: tuple[int, ...]) -> None:
    """Invalid arguments raise an error."""
    with pytest.raises(ValueError, match="in proportion"):
        in_proportion(3, broken)
    with pytest.raises(ValueError, match="among 0 members"):
        evenly(3, 0)


def test_a_member_that_holds_up_the_others_is_a_straggler() -> None:
    """A member with a fixed part longer than the others' step is a straggler, and its gain is stated."""
    quick = ComputeTime(per_sample_s=0.01, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    stuck = ComputeTime(per_sample_s=0.01, fixed_s=2.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    some = [SplitMember(compute=quick), SplitMember(compute=stuck), SplitMember(compute=quick)]
    found = find_stragglers(100, some)
    assert [leaver.member for leaver in found] == [1]
    assert found[0].step_s == pytest.approx(0.5)
    assert found[0].gain_ratio == pytest.approx(1 - 0.5 / 2.01)
    assert "floor of 1" in found[0].reason
    assert find_stragglers(1000, some) == ()
    assert find_stragglers(100, some, least_members=3) == ()
