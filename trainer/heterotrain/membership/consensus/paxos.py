"""How survivors agree on who takes part in the next formation: single-decree Paxos, one instance a formation.

The acceptors of formation ``g.(k+1)`` are the members of ``g.k`` (those who announced their leave included: they vote,
then go), so two disjoint sets can never both be decided: each needs a strict majority of the same acceptors. A value is
a set of plan ranks. See L. Lamport, "Paxos Made Simple", 2001.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Ballot:
    """A proposal's number; ``rank`` makes it unique."""

    number: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A value that an acceptor voted for, and in which ballot."""

    ballot: Ballot
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptor:
    """One member's memory in one instance."""

    promised: Ballot | None = None
    accepted: Accepted | None = None


def prepare(acceptor: Acceptor, ballot: Ballot) -> tuple[Acceptor, bool]:
    """Promise to ignore lower ballots; ``False`` when a higher one has that promise already."""
    if acceptor.promised is not None and ballot < acceptor.promised:
        return acceptor, False
    return replace(acceptor, promised=ballot), True


def accept(acceptor: Acceptor, ballot: Ballot, ranks: tuple[int, ...]) -> tuple[Acceptor, bool]:
    """Vote for a value; ``False`` when a higher ballot has been promised."""
    if acceptor.promised is not None and ballot < acceptor.promised:
        return acceptor, False
    return Acceptor(promised=ballot, accepted=Accepted(ballot=ballot, ranks=ranks)), True


def value_to_propose(wish: tuple[int, ...], promises: Iterable[Accepted | None]) -> tuple[int, ...]:
    """Return what must be proposed: the value of the highest ballot that somebody voted for, else the own wish."""
    voted = [accepted for accepted in promises if accepted is not None]
    return max(voted, key=lambda accepted: accepted.ballot).ranks if voted else wish


def is_majority(votes: int, acceptors: int) -> bool:
    """Return whether ``votes`` are a strict majority of ``acceptors``."""
    return 2 * votes > acceptors


def fully_connected(
    ranks: Iterable[int], apart: Collection[tuple[int, int]], *, workers: Mapping[int, str]
) -> tuple[int, ...]:
    """Return those of the ranks of whom everybody can call everybody: one of each two workers that are apart stays out.

    Out goes who is apart from most others, of equals the worker with the highest rank, until nobody is apart from anybody.

    Args:
        ranks: who would take part, as ranks of the plan.
        apart: pairs of ranks of which one cannot call the other.
        workers: the pod of each rank; its ranks share its network and its fate.
    """
    left = set(ranks)
    while True:
        met = {frozenset((workers[one], workers[other])) for one, other in apart if {one, other} <= left}
        if not met:
            return tuple(sorted(left))
        strangers = Counter(worker for pair in met for worker in pair)
        out = max(strangers, key=lambda worker: (strangers[worker], max(r for r in left if workers[r] == worker)))
        left = {rank for rank in left if workers[rank] != out}
