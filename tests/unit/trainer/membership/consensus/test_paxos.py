"""Two different sets of survivors are never both decided, whatever messages are lost, late or duplicated."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from heterotrain.membership.consensus.paxos import (
    Accepted,
    Acceptor,
    Ballot,
    accept,
    fully_connected,
    is_majority,
    prepare,
    value_to_propose,
)
from heterotrain_core.contract.plan import Layout, LayoutKind
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.plans import plan_of
from support.repeat import times

MEMBERS = 5
LAYOUTS = (2, 1, 2)
"""Ranks of each member in votes of members with several ranks; together as many as ``MEMBERS``."""


def test_a_promise_binds() -> None:
    """Lower ballots get neither promise nor vote afterwards; the same ballot does."""
    low, high = Ballot(number=1, rank=4), Ballot(number=2, rank=0)
    acceptor, promised = prepare(Acceptor(), high)
    assert promised
    assert prepare(acceptor, low) == (acceptor, False)
    assert accept(acceptor, low, (1,)) == (acceptor, False)
    assert accept(acceptor, high, (1,))[1]


def test_a_vote_seen_must_be_proposed_again() -> None:
    """Of several votes the one in the highest ballot counts; without any, the proposer's own wish."""
    votes = [
        None,
        Accepted(ballot=Ballot(number=1, rank=3), ranks=(3,)),
        Accepted(ballot=Ballot(number=1, rank=1), ranks=(1,)),
    ]
    assert value_to_propose((0,), votes) == (3,)
    assert value_to_propose((0,), [None]) == (0,)


@given(votes=st.integers(0, 9), acceptors=st.integers(1, 9))
def test_two_majorities_overlap(votes: int, acceptors: int) -> None:
    """The complement of a strict majority is not a majority."""
    assert not (is_majority(votes, acceptors) and is_majority(acceptors - votes, acceptors))


class Proposal:
    """One proposer's attempt and the replies so far."""

    def __init__(self, ballot: Ballot, wish: tuple[int, ...]) -> None:
        self.ballot = ballot
        self.wish = wish
        self.promises: dict[int, Accepted | None] = {}
        self.value: tuple[int, ...] | None = None
        self.votes: set[int] = set()


class Voting(RuleBasedStateMachine):
    """Proposers start at any time and reach any acceptors in any order; messages may be lost or doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptors = {rank: Acceptor() for rank in range(MEMBERS)}
        self.proposals: list[Proposal] = []
        self.decided: set[tuple[int, ...]] = set()

    def wish(self, seen: set[int]) -> tuple[int, ...]:
        """Return the set that a proposer wants, which sees these ranks."""
        return tuple(sorted(seen))

    @rule(
        number=st.integers(1, 4),
        rank=st.integers(0, MEMBERS - 1),
        seen=st.sets(st.integers(0, MEMBERS - 1), min_size=1),
    )
    def propose(self, number: int, rank: int, seen: set[int]) -> None:
        """Begin a proposal; a member never uses a ballot twice."""
        ballot, wish = Ballot(number=number, rank=rank), self.wish(seen)
        if wish and all(proposal.ballot != ballot for proposal in self.proposals):
            self.proposals.append(Proposal(ballot, wish))

    @precondition(lambda self: self.proposals)
    @rule(data=st.data(), member=st.integers(0, MEMBERS - 1))
    def deliver_prepare(self, data: st.DataObject, member: int) -> None:
        """A prepare reaches a member, and its answer the proposer."""
        proposal = data.draw(st.sampled_from(self.proposals))
        self.acceptors[member], promised = prepare(self.acceptors[member], proposal.ballot)
        if promised and proposal.value is None:
            proposal.promises[member] = self.acceptors[member].accepted
            if is_majority(len(proposal.promises), MEMBERS):
                proposal.value = value_to_propose(proposal.wish, proposal.promises.values())

    @precondition(lambda self: any(proposal.value for proposal in self.proposals))
    @rule(data=st.data(), member=st.integers(0, MEMBERS - 1))
    def deliver_accept(self, data: st.DataObject, member: int) -> None:
        """An accept reaches a member, and its vote the proposer."""
        proposal = data.draw(st.sampled_from([each for each in self.proposals if each.value]))
        assert proposal.value is not None
        self.acceptors[member], voted = accept(self.acceptors[member], proposal.ballot, proposal.value)
        if voted:
            proposal.votes.add(member)
            if is_majority(len(proposal.votes), MEMBERS):
                self.decided.add(proposal.value)

    @invariant()
    def agreed(self) -> None:
        """At most one value is ever decided."""
        assert len(self.decided) <= 1


TestVoting = Voting.TestCase
TestVoting.settings = settings(max_examples=times(gate=40, every=1000))


class VotingOfMembers(Voting):
    """Each rank votes, also that of a broken member, but only whole members are proposed."""

    plan = plan_of([1] * len(LAYOUTS), layouts=[Layout(kind=LayoutKind.SHARDED, shards=n) for n in LAYOUTS])

    def wish(self, seen: set[int]) -> tuple[int, ...]:
        """Return the ranks of the whole members among these."""
        return self.plan.ranks_of_whole_members(seen)

    @invariant()
    def of_whole_members(self) -> None:
        """A decided set is one that can train."""
        assert all(self.plan.ranks_of_whole_members(ranks) == ranks for ranks in self.decided)


TestVotingOfMembers = VotingOfMembers.TestCase
TestVotingOfMembers.settings = settings(max_examples=times(gate=40, every=1000))


def as_they_are(ranks: Collection[int]) -> tuple[int, ...]:
    """Return all ranks: each is a member."""
    return tuple(sorted(ranks))


@given(
    workers=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    apart=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8),
)
def test_remaining_ranks_can_call_each_other_and_none_is_removed_needlessly(
    workers: list[int], apart: list[tuple[int, int]]
) -> None:
    """Workers are removed as a whole, and only workers that are apart from another one."""
    pod = {rank: f"w{worker}" for rank, worker in enumerate(workers)}
    left = fully_connected(pod, apart, workers=pod, whole=as_they_are)
    assert left == tuple(sorted(left))
    assert not [pair for pair in apart if set(pair) <= set(left)]
    assert {pod[rank] for rank in left}.isdisjoint({pod[rank] for rank in pod if rank not in left})
    strangers = {pod[rank] for pair in apart if set(pair) <= set(pod) for rank in pair}
    assert {pod[rank] for rank in pod} - strangers <= {pod[rank] for rank in left}


@pytest.mark.parametrize(
    ("apart", "left"),
    [
        ([], (0, 1, 2, 3)),
        ([(2, 0)], (0, 1, 3)),
        ([(0, 2)], (0, 1, 3)),
        ([(1, 0), (2, 0), (3, 0)], (1, 2, 3)),
        ([(0, 1), (0, 2), (0, 3)], (1, 2, 3)),
        ([(3, 5)], (0, 1, 2, 3)),
        ([(0, 1), (2, 3)], (0, 2)),
    ],
    ids=["none", "one way", "the other way", "three cannot call one", "one cannot call three", "absent", "two pairs"],
)
def test_the_rank_that_stays_out(apart: list[tuple[int, int]], left: tuple[int, ...]) -> None:
    """The rank that is apart from most others, on a tie the highest."""
    assert fully_connected(range(4), apart, workers={rank: f"w{rank}" for rank in range(4)}, whole=as_they_are) == left


@given(
    layouts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    seen=st.sets(st.integers(0, 11)),
    apart=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8),
    per_pod=st.integers(1, 3),
)
def test_whole_members_remain_and_those_without_a_stranger_stay(
    layouts: list[int], seen: set[int], apart: list[tuple[int, int]], per_pod: int
) -> None:
    """Whatever is lost or apart: nobody goes whose member, and whose pods, have no rank that is apart from another."""
    plan = plan_of([1] * len(layouts), layouts=[Layout(kind=LayoutKind.SHARDED, shards=n) for n in layouts])
    pod = {rank.rank: f"w{rank.rank // per_pod}" for rank in plan.ranks}
    left = fully_connected(seen & set(pod), apart, workers=pod, whole=plan.ranks_of_whole_members)
    assert plan.ranks_of_whole_members(left) == left
    assert not [pair for pair in apart if set(pair) <= set(left)]
    candidates = set(plan.ranks_of_whole_members(seen))
    strange = {pod[rank] for pair in apart if set(pair) <= candidates for rank in pair}
    touched = {plan.ranks[rank].member for rank in candidates if pod[rank] in strange}
    assert {rank for rank in candidates if plan.ranks[rank].member not in touched} <= set(left)
