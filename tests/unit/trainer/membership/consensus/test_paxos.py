"""Two different sets of survivors are never both decided, whatever messages are lost, late or duplicated."""

from __future__ import annotations

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
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

MEMBERS = 5


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

    @rule(
        number=st.integers(1, 4),
        rank=st.integers(0, MEMBERS - 1),
        wish=st.sets(st.integers(0, MEMBERS - 1), min_size=1),
    )
    def propose(self, number: int, rank: int, wish: set[int]) -> None:
        """Begin a proposal; a member never uses a ballot twice."""
        ballot = Ballot(number=number, rank=rank)
        if all(proposal.ballot != ballot for proposal in self.proposals):
            self.proposals.append(Proposal(ballot, tuple(sorted(wish))))

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


@given(
    workers=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    apart=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8),
)
def test_remaining_ranks_can_call_each_other_and_none_is_removed_needlessly(
    workers: list[int], apart: list[tuple[int, int]]
) -> None:
    """Workers are removed as a whole, and only workers that are apart from another one."""
    pod = {rank: f"w{worker}" for rank, worker in enumerate(workers)}
    left = fully_connected(pod, apart, workers=pod)
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
    assert fully_connected(range(4), apart, workers={rank: f"w{rank}" for rank in range(4)}) == left
