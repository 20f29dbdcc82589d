"""When a rank that has to leave does so."""

from __future__ import annotations

from typing import Any, cast

from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.membership.roster import FormationId, roster_of
from heterotrain.steps.ballot import Voting
from heterotrain.steps.departure import LEAVING, WAITS, Departure, Leaving
from heterotrain.steps.shutdown import Shutdown
from heterotrain_core.contract.plan import Layout, LayoutKind, Member, Plan, Rank


class _Asked:
    """Whether this process was asked to end, and when it is killed."""

    leaving, left_s = False, None


def a_group(*, cuts: tuple[int, ...] = (3,), drain: tuple[str, ...] = ()) -> ActiveGroup:
    """Return the formation of the first of two workers."""
    layout = Layout(kind=LayoutKind.PIPELINE, cuts=cuts) if cuts else Layout()
    members = tuple(Member(index=i, pool="pool", share_samples=4, layout=layout) for i in range(1 if cuts else 2))
    ranks = tuple(
        Rank(
            rank=i, member=0 if cuts else i, worker=f"w{i}", worker_uid=f"u{i}", address="127.0.0.1", peer_port=1 + i,
            on_demand=True, stage=i if cuts else 0,
        )
        for i in range(2)
    )  # fmt: skip
    plan = Plan(
        job_uid="job", generation=1, revision=1, members=members, ranks=ranks, drain=drain,
        global_batch_samples=4 * len(members),
    )  # fmt: skip
    held = HeldPlan(plan=plan, text="")
    roster = roster_of(plan, plan_ranks=(0, 1), formation=FormationId(generation=1, number=0))
    return ActiveGroup(membership=cast("Any", None), roster=roster, rank=0, group=None, agreed=held)


def voted(leave: Departure, group: ActiveGroup, next_s: float = 0.0) -> float:
    """Return what the rank votes in a step before one of ``next_s`` seconds."""
    step, held = cast("Any", None), group.agreed
    before_hooks = leave.vote(Voting(step, group, held, hooks_follow=True, next_s=next_s))[0]
    found = leave.vote(Voting(step, group, held, hooks_follow=False, next_s=next_s))[0]
    assert before_hooks == (1.0 if found else 0.0), "nobody waits for hooks that take long"
    return found


def test_a_stage_waits_for_half_of_its_grace_period() -> None:
    """From the first step in which the plan asks it to leave; the step must be over by then."""
    now = [100.0]
    leave = Departure(cast("Shutdown", _Asked()), grace_s=30.0, operated=True, clock=lambda: now[0])
    assert voted(leave, a_group()) == 0.0
    drained = a_group(drain=("w0",))
    assert (voted(leave, drained, 14.0), voted(leave, drained, 16.0)) == (WAITS, 1.0)
    now[0] = 110.0
    assert (voted(leave, drained, 4.0), voted(leave, drained, 6.0)) == (WAITS, 1.0)
    assert voted(leave, a_group()) == 0.0, "the node stays after all"
    assert voted(leave, drained, 14.0) == WAITS


def test_after_sigterm_what_is_left_of_the_grace_period_counts() -> None:
    asked = _Asked()
    asked.leaving, asked.left_s = True, 20.0  # type: ignore[assignment]  # a float, or None
    leave = Departure(cast("Shutdown", asked), grace_s=30.0, operated=True)
    assert (voted(leave, a_group(), 4.0), voted(leave, a_group(), 5.0)) == (WAITS, 1.0)


def test_a_rank_that_holds_the_whole_model_and_one_without_an_operator_leave_at_once() -> None:
    leave = Departure(cast("Shutdown", _Asked()), grace_s=30.0, operated=True)
    assert voted(leave, a_group(cuts=(), drain=("w0",))) == 1.0
    alone = Departure(cast("Shutdown", _Asked()), grace_s=30.0, operated=False)
    assert voted(alone, a_group(drain=("w0",))) == 1.0


def test_nobody_waits_for_those_who_go() -> None:
    """Once one rank leaves, or all have to, all that have to do."""
    table = {
        (0.0, 1.0, 1.0): Leaving(now=(1, 2)), (0.0, WAITS, WAITS): Leaving(waiting=(1, 2)), (0.0, 0.0): Leaving(),
        (0.0, WAITS, 1.0): Leaving(now=(1, 2)), (WAITS, WAITS): Leaving(now=(0, 1)),
    }  # fmt: skip
    for votes, found in table.items():
        assert LEAVING.reduction([(vote,) for vote in votes]) == found
