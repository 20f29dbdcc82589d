"""All histories of a few steps that the next vote confirms, on a few ranks: losses, joins and spoilt gradients.

The decisions are the library's: what a gate that was read says, what follows from the votes, and whose state is the
newest. The model has the rest: a host and a device for each rank, which do one thing at a time, in any order. A device
adds up in rounds, in the order of its queue; a sum ends when all members have begun it, or in the middle when its rank
cuts the formation. A rank may die at any time, also in the middle of sending its vote, and may cut by a false alarm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
from heterotrain.network.control import StepDecision, Tally
from heterotrain.state.transfer import StateSummary, assign_roles
from heterotrain.steps.states import StepState, after_gate

OPEN, BAD, FLAG = "open", "not finite", "flag"
COMPUTE, VOTE, COUNT, LOOK = range(4)
RULES = frozenset({"gate", "confirm first", "device decides", "apart is over"})


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a formation.

    Attributes:
        steps: committed ones, as its host knows them; -1 for a rank without a state.
        weights: steps whose updates its device has taken.
        waits: whether the step after the committed ones is queued.
        repeated: number of a step that was closed by a value before.
        place: what its host does next.
        numbers: of the steps that it has computed in this formation, one for each round.
        votes: (row, ranks that it has reached), one for each round.
        queued: rounds that have an update in the device's queue.
        begun: rounds whose sums its device has begun.
        sums: of those that have ended, whether they are whole, and the steps that they are sums of.
        gates: of the rounds with an update, in their order.
    """

    steps: int
    weights: tuple[int, ...] = ()
    alive: bool = True
    cut: bool = False
    waits: bool = False
    repeated: int = -1
    place: int = COMPUTE
    numbers: tuple[int, ...] = ()
    votes: tuple[tuple[bytes, int], ...] = ()
    queued: tuple[int, ...] = ()
    begun: int = 0
    sums: tuple[frozenset[int] | None, ...] = ()
    gates: tuple[str, ...] = ()


State = tuple[tuple[Rank, ...], int, int]
"""Ranks, faults that are left, and ranks that may still join."""


@cache
def row(ok: bool, steps: int) -> bytes:  # as the library's
    return Tally([]).row(ok, steps, 1.0, 1.0, [])


@cache
def decided(rows: tuple[bytes, ...]) -> StepDecision:
    tally = Tally([])
    tally.row(True, 0, 1.0, 1.0, [])  # as above
    return tally.decide(rows)


@dataclass(frozen=True)
class Protocol:
    """The histories of a job; ``rules``: those that it keeps, ``hasty``: ranks that confirm every step at once."""

    steps: int
    bad: int = -1
    rules: frozenset[str] = RULES
    hasty: int = -1

    def following(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what may happen next."""
        ranks, faults, joins = state
        living = [rank for rank in ranks if rank.alive]
        if living and all(rank.cut and self._is_drained(rank) for rank in living):
            for joined in range(joins + 1):
                yield f"{joined} join", (self._formed(living, joined), faults, joins - joined)
            return
        for number, rank in enumerate(ranks):
            if not rank.alive:
                continue
            others = [other for other in ranks if other is not rank]
            events = [*self._device(rank, ranks), *self._host(number, rank, ranks)]
            if any(not other.alive or other.cut for other in others) and not rank.cut:
                events.append(("notices a loss", replace(rank, cut=True)))
            for what, after in events:
                yield f"{number} {what}", (_with(ranks, number, after), faults, joins)
            if faults:
                for what, after in self._faults(rank, len(ranks)):
                    yield f"{number} {what}", (_with(ranks, number, after), faults - 1, joins)

    def problem(self, state: State) -> str:
        """Return what must not happen and has; empty if nothing has."""
        living = [rank for rank in state[0] if rank.alive and rank.steps >= 0]
        for rank in living:
            if rank.weights != tuple(step for step in range(self.steps) if step != self.bad)[: len(rank.weights)]:
                return f"the weights are those of {rank.weights}"
            if rank.cut and self._is_drained(rank):
                after, held = self._after_cut(rank).steps, _version(rank.weights, self.bad)
                if after not in held or rank.steps > max(held):
                    return f"the host believes in {after} steps, and the device has taken {rank.weights}"
        found = [max(_version(rank.weights, self.bad)) for rank in living]
        if found and max(found) - min(min(_version(rank.weights, self.bad)) for rank in living) > 2 + (self.bad >= 0):
            return f"ranks differ: {[rank.weights for rank in living]}"
        if any(len(rank.numbers) > 3 * self.steps + 4 for rank in living):
            return "no end"
        return ""

    # -- one rank ----------------------------------------------------------------------------------------------------

    def _now(self, number: int, rank: Rank, step: int) -> bool:
        """Return whether a step is confirmed at once: the last, and one that is repeated."""
        return step in (self.steps - 1, rank.repeated) or number == self.hasty

    def _host(self, number: int, rank: Rank, ranks: tuple[Rank, ...]) -> Iterator[tuple[str, Rank]]:
        if rank.cut or rank.steps == self.steps:
            return
        step = rank.steps + rank.waits
        if rank.place == COMPUTE:
            yield f"computes {step}", replace(rank, place=VOTE, numbers=(*rank.numbers, step))
        elif rank.place == VOTE:
            for voting in self._confirmed(rank):
                vote = (row(not voting.waits, voting.steps), (1 << len(ranks)) - 1)
                yield f"votes on {step}", replace(voting, place=COUNT, votes=(*rank.votes, vote))
        elif rank.place == COUNT:
            at = len(rank.votes) - 1
            heard = [other.votes[at] for other in ranks if len(other.votes) > at and other.votes[at][1] >> number & 1]
            if len(heard) == len(ranks):
                yield self._counted(number, rank, decided(tuple(vote for vote, _ in heard)))
        elif rank.place == LOOK and len(rank.gates) == len(rank.queued):
            if rank.gates[-1] == FLAG:
                yield "finds a part of a sum", replace(rank, cut=True)
            else:  # a step that is not finite is skipped
                yield f"commits {step} at once", replace(rank, place=COMPUTE, steps=rank.steps + 1)

    def _confirmed(self, rank: Rank) -> Iterator[Rank]:
        """Yield the rank after it has read the gate of the step that waits, if the device has passed it."""
        if not rank.waits:
            yield rank
        elif "confirm first" not in self.rules:
            yield replace(rank, steps=rank.steps + 1, waits=False)
        elif len(rank.gates) == len(rank.queued) and rank.gates[-1] != FLAG:
            entered = after_gate(was_open=rank.gates[-1] == OPEN, is_cut=False)
            yield rank if entered is StepState.QUEUED else replace(rank, steps=rank.steps + 1, waits=False)

    def _counted(self, number: int, rank: Rank, decision: StepDecision) -> tuple[str, Rank]:
        if decision.apart and "apart is over" in self.rules:
            return "meets a rank at another step", replace(rank, cut=True)
        if not decision.committed:
            again = rank.steps if rank.waits else rank.repeated
            return "goes back", replace(rank, place=COMPUTE, waits=False, repeated=again)
        step = rank.numbers[-1]
        queued = replace(rank, queued=(*rank.queued, len(rank.numbers) - 1))
        if self._now(number, rank, step):
            return f"queues {step} and waits", replace(queued, place=LOOK)
        return f"queues {step}", replace(queued, place=COMPUTE, waits=True)

    def _device(self, rank: Rank, ranks: tuple[Rank, ...]) -> Iterator[tuple[str, Rank]]:
        at, gate = len(rank.sums), len(rank.gates)
        if gate < len(rank.queued) and rank.queued[gate] < at:
            content = rank.sums[rank.queued[gate]]
            for what in self._gate(rank, content):
                yield f"passes a gate: {what}", self._updated(replace(rank, gates=(*rank.gates, what)), content, what)
        elif rank.begun > at:
            if all(other.begun > at for other in ranks):
                numbers = frozenset(other.numbers[at] for other in ranks)
                yield "ends a sum", replace(rank, sums=(*rank.sums, numbers))
            if rank.cut:
                yield "leaves a sum", replace(rank, sums=(*rank.sums, None))
        elif rank.begun < len(rank.numbers):
            yield "begins a sum", replace(rank, begun=rank.begun + 1)

    def _gate(self, rank: Rank, content: frozenset[int] | None) -> list[str]:
        found = [BAD if content is not None and self.bad in content else OPEN]
        if content is None or rank.cut:  # the flag goes up before a sum ends in the middle
            found = [FLAG] if content is None else [*found, FLAG]
        return found

    def _updated(self, rank: Rank, content: frozenset[int] | None, gate: str) -> Rank:
        if gate == OPEN or "gate" not in self.rules:
            taken = rank.numbers[rank.queued[len(rank.gates) - 1]] if content == {_only(content)} else -1
            return replace(rank, weights=(*rank.weights, taken))
        return rank

    def _faults(self, rank: Rank, ranks: int) -> Iterator[tuple[str, Rank]]:
        yield "dies", replace(rank, alive=False)
        if not rank.cut:
            yield "cuts", replace(rank, cut=True)
            if rank.place == VOTE:
                for voting, reached in product(self._confirmed(rank), range(1, (1 << ranks) - 1)):
                    vote = (row(not voting.waits, voting.steps), reached)
                    yield (
                        f"dies, its vote reaches {reached:b}",
                        replace(voting, alive=False, place=COUNT, votes=(*rank.votes, vote)),
                    )

    # -- between two formations --------------------------------------------------------------------------------------

    def _is_drained(self, rank: Rank) -> bool:
        return rank.begun == len(rank.numbers) == len(rank.sums) and len(rank.gates) == len(rank.queued)

    def _after_cut(self, rank: Rank) -> Rank:
        """Return the rank after it has read the last gate."""
        if not (rank.waits or rank.place == LOOK) or not rank.gates:
            return rank
        was_open = rank.gates[-1] == OPEN
        if "device decides" not in self.rules:
            was_open = False
        entered = after_gate(was_open=was_open, is_cut=True)
        return replace(rank, waits=False, steps=rank.steps + (entered is StepState.COMMITTED))

    def _formed(self, ranks: list[Rank], joined: int) -> tuple[Rank, ...]:
        """Return the ranks of the next formation, with the newest state on all of them."""
        ended = [*map(self._after_cut, ranks), *joined * [Rank(steps=-1)]]
        roles = assign_roles([StateSummary(steps=rank.steps, evaluated=0) for rank in ended])
        newest = ended[roles.leader]
        return tuple(
            Rank(steps=held.steps, weights=held.weights)
            for held in (newest if number in roles.receivers else rank for number, rank in enumerate(ended))
        )


def _only(content: frozenset[int] | None) -> int | None:
    return next(iter(content)) if content is not None and len(content) == 1 else None


def _version(weights: tuple[int, ...], bad: int) -> set[int]:
    """Return how many committed steps these weights may be those of: a skipped one leaves no trace."""
    last = weights[-1] + 1 if weights else 0
    return {last, last + 1} if last == bad else {last}


def _with(ranks: tuple[Rank, ...], number: int, after: Rank) -> tuple[Rank, ...]:
    return (*ranks[:number], after, *ranks[number + 1 :])


def search(protocol: Protocol, ranks: int, *, faults: int, joins: int = 0, most: int = 2_000_000) -> tuple[str, int]:
    """Return the first problem in a breadth-first search, with its history, and the number of states, or ``most``."""
    start: State = (tuple(Rank(steps=0) for _ in range(ranks)), faults, joins)
    before: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(before) < most:
        state = queue.popleft()
        problem = protocol.problem(state)
        following = [] if problem else list(protocol.following(state))
        living = [rank for rank in state[0] if rank.alive]
        if not following and not problem and any(rank.steps != protocol.steps for rank in living):
            problem = "ranks are stuck"
        if problem:
            history, at = [], before[state]
            while at is not None:
                history.append(at[1])
                at = before[at[0]]
            return f"{problem}: {'; '.join(reversed(history))}", len(before)
        for what, after in following:
            if after not in before:
                before[after] = (state, what)
                queue.append(after)
    return "", len(before)


def check(protocol: Protocol, ranks: int, *, faults: int, joins: int = 0, states: int) -> None:
    """Fail unless there is no problem in at least so many states, and four times as many at most."""
    problem, found = search(protocol, ranks, faults=faults, joins=joins, most=4 * states)
    assert not problem, problem
    assert states <= found < 4 * states, f"{found} states: the search is smaller, or takes longer, than it should"


@pytest.mark.heavy
@pytest.mark.parametrize("bad", [-1, 1])
def test_two_ranks(bad: int) -> None:
    """Two faults; or a fault, and a rank that joins after it."""
    check(Protocol(steps=3, bad=bad), 2, faults=1, joins=1, states=10_000)
    if bad < 0:
        check(Protocol(steps=2), 2, faults=2, states=5_000)


def test_a_rank_that_confirms_at_once_among_others() -> None:
    """It skips what they repeat. The vote shows that they are apart, and the newest state is passed on."""
    check(Protocol(steps=3, bad=1, hasty=0), 2, faults=0, states=200)
    check(Protocol(steps=2, bad=0, hasty=0), 2, faults=1, states=4_000)


@pytest.mark.thorough
@pytest.mark.timeout(3000)  # minutes of a processor
@pytest.mark.parametrize("bad", [-1, 0])
def test_three_ranks(bad: int) -> None:
    check(Protocol(steps=2, bad=bad), 3, faults=1, states=150_000)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("gate", "the weights are those of"),
        ("confirm first", "the host believes in"),
        ("device decides", "the host believes in"),
        ("apart is over", "no end"),
    ],
)
def test_each_rule_is_needed(rule: str, problem: str, ranks: int) -> None:
    """Without it, the search finds a history that goes wrong."""
    is_apart = rule == "apart is over"
    protocol = Protocol(steps=3, rules=RULES - {rule}, bad=1 if is_apart else -1, hasty=0 if is_apart else -1)
    found, _ = search(protocol, ranks, faults=int(not is_apart))
    assert found.startswith(problem), found
