"""Single-decree Paxos, one instance per formation: survivors agree on the members of the next formation.

The acceptors of formation ``g.(k+1)`` are the members of ``g.k``, including those that announced their leave: they vote
and then go. So do the living ranks of a broken member: they vote, and then wait as spares. Two disjoint sets can
therefore never both be decided, since each needs a strict majority of the same acceptors. A value is a set of plan
ranks: those of whole members. See L. Lamport, "Paxos Made Simple", 2001.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Ballot(NamedTuple):
    """The number of a proposal; ``rank`` makes it unique. A row of two numbers in messages."""

    number: int
    rank: int


class Accepted(NamedTuple):
    """A value that an acceptor voted for, and the ballot of that vote; a row of both in messages."""

    ballot: Ballot
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptor:
    """The state of one member in one instance."""

    promised: Ballot | None = None
    accepted: Accepted | None = None


def prepare(acceptor: Acceptor, ballot: Ballot) -> tuple[Acceptor, bool]:
    """Promise to ignore lower ballots; ``False`` when a higher ballot already has that promise."""
    if acceptor.promised is not None and ballot < acceptor.promised:
        return acceptor, False
    return replace(acceptor, promised=ballot), True


def accept(acceptor: Acceptor, ballot: Ballot, ranks: tuple[int, ...]) -> tuple[Acceptor, bool]:
    """Vote for a value; ``False`` when a higher ballot has been promised."""
    if acceptor.promised is not None and ballot < acceptor.promised:
        return acceptor, False
    return Acceptor(promised=ballot, accepted=Accepted(ballot=ballot, ranks=ranks)), True


def value_to_propose(wish: tuple[int, ...], promises: Iterable[Accepted | None]) -> tuple[int, ...]:
    """Return the value to propose: that of the highest ballot any acceptor voted for, else the own ``wish``."""
    voted = [accepted for accepted in promises if accepted is not None]
    return max(voted, key=lambda accepted: accepted.ballot).ranks if voted else wish


def is_majority(votes: int, acceptors: int) -> bool:
    """Return whether ``votes`` are a strict majority of ``acceptors``."""
    return 2 * votes > acceptors


def fully_connected(
    ranks: Iterable[int],
    apart: Collection[tuple[int, int]],
    *,
    workers: Mapping[int, str],
    whole: Callable[[Collection[int]], tuple[int, ...]],
) -> tuple[int, ...]:
    """Return a subset of the ranks, of whole members, in which every rank can call every other.

    Of two workers that are apart, one stays out. The worker that is apart from the most others is removed first (on a
    tie, the one with the highest rank), until no two workers are apart.

    Args:
        ranks: the candidates, as ranks of the plan.
        apart: pairs of ranks of which one cannot call the other.
        workers: the pod of each rank. The ranks of a pod share its network, so those that are apart go together.
        whole: returns those of some ranks whose member is whole. The other ranks of a member go with it.
    """
    left = set(whole(set(ranks)))
    while True:
        met = {frozenset((workers[one], workers[other])) for one, other in apart if {one, other} <= left}
        if not met:
            return tuple(sorted(left))
        strangers = Counter(worker for pair in met for worker in pair)
        out = max(strangers, key=lambda worker: (strangers[worker], max(r for r in left if workers[r] == worker)))
        left = set(whole({rank for rank in left if workers[rank] != out}))
