"""Transfer of the state from ranks that have it to ranks that lack it, right after a formation has connected.

Every rank reports what it holds and what it needs. All derive the same ``roles`` from the reports and compute the same
``routes``. A rank that has the newest state but needs other parts of it, because its layout has changed, receives what
it lacks and keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Payload
from heterotrain.state.loads import Holdings, loads_of, range_in
from heterotrain.state.memory import memory_of
from heterotrain.state.moves import batches, releases
from heterotrain.state.ranges import Holding, TensorRange, covering
from heterotrain.state.routes import rounds
from heterotrain.state.tensors import Entry, Flat, Held, entries_of, merged, room_for


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """The state that one rank holds.

    Attributes:
        steps: committed steps; -1 when it has no state.
        hooked: committed steps at the last call of hooks that run every few steps; -1 when it has no state.
        evaluated: epochs whose hooks have run; -1 when it has no state.
        checkpoint_generation: generation of its best checkpoint on disk; -1 when there is none.
        checkpoint_step: committed steps in that checkpoint; -1 when there is none.
        stopped: whether the script has ended the training early.
        has: what it holds of parameters and buffers; ``None`` for everything.
        needs: what its model consists of; ``None`` for everything.
    """

    steps: int
    hooked: int = 0
    evaluated: int
    checkpoint_generation: int = -1
    checkpoint_step: int = -1
    stopped: bool = False
    has: Holding | None = None
    needs: Holding | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: of two states the greater is the newer one."""
        return (self.steps, self.hooked, self.evaluated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Senders and receivers of the state, as ranks in the group.

    Attributes:
        leader: the donor whose values count wherever all ranks need the same one.
        donors: ranks that hold the newest state, or parts of it (when no rank had any: those that begin it).
        receivers: ranks that need it, or parts of it.
        describers: donors that hold everything together, the leader first.
        places: what each rank has and needs.
        cold_start: no rank has state: the leader starts from its checkpoint, or from the beginning.
        lost: ranks have state, but nobody has some part of it, at any step.
    """

    leader: int
    donors: tuple[int, ...]
    receivers: tuple[int, ...]
    describers: tuple[int, ...]
    places: tuple[Holdings, ...]
    cold_start: bool = False
    lost: bool = False


def assign_roles(summaries: Sequence[StateSummary], sizes: Mapping[str, int] | None = None) -> Roles:
    """Return donors and receivers: the newest whole state wins, else the best checkpoint, else the lowest rank.

    Of two states after the same step, the one whose hooks have run is the newer: they may have changed it. Ranks that
    hold parts of a state count together. A state of which nobody has some part is passed over.

    Args:
        summaries: by rank.
        sizes: elements of each parameter of the whole model; only needed where a rank holds a part of it.
    """
    known: dict[str, int] = {}
    for summary in summaries:
        for holding in (summary.has, summary.needs):
            for name, own in (holding or {}).items():
                known[name] = max(own.stop, known.get(name, 0))  # the first holders may have the first elements only
    whole = known | dict(sizes or {})
    for order in sorted({summary.order for summary in summaries if summary.steps >= 0}, reverse=True):
        held = {rank: summary.has for rank, summary in enumerate(summaries) if summary.order == order}
        describers = covering(whole, held)
        if describers is not None:
            receivers = tuple(
                rank
                for rank, summary in enumerate(summaries)
                if rank not in held or not _includes(summary.has, summary.needs)
            )
            places = tuple(
                Holdings(has=summary.has, needs=summary.needs, is_donor=rank in held)
                for rank, summary in enumerate(summaries)
            )
            return Roles(
                leader=describers[0], donors=tuple(held), receivers=receivers, describers=describers, places=places
            )
    ranked = sorted(
        range(len(summaries)),
        key=lambda rank: (-summaries[rank].checkpoint_generation, -summaries[rank].checkpoint_step, rank),
    )
    donors = covering(whole, {rank: summaries[rank].needs for rank in ranked}) or (ranked[0],)
    lost = any(summary.steps >= 0 for summary in summaries)
    return replace(_giving(donors, [summary.needs for summary in summaries]), cold_start=not lost, lost=lost)


def copying(donor: int, ranks: int) -> Roles:
    """Return the roles where one of ``ranks`` ranks sends the whole state to all others."""
    return _giving((donor,), [None] * ranks)


def _giving(donors: tuple[int, ...], needs: Sequence[Holding | None]) -> Roles:
    """Return the roles where the donors have what their models consist of, and the other ranks have nothing."""
    places = tuple(Holdings(has=own, needs=own, is_donor=rank in donors) for rank, own in enumerate(needs))
    others = tuple(rank for rank in range(len(needs)) if rank not in donors)
    return Roles(leader=donors[0], donors=donors, receivers=others, describers=donors, places=places)


def part_of(flat: Flat, needs: Holding | None) -> Flat:
    """Return what a rank needs of its own state, all of which it has; tensors of parameters are shared, not copied."""
    into = room_for(entries_of(flat.skeleton), lambda entry: range_in(entry, needs), flat.by_name)
    _keep(flat.by_name, into)
    return Flat(flat.skeleton, into)


def exchange(
    group: Group, roles: Roles, own: Callable[[], Flat], *, hold: Callable[[Flat], None] = lambda _flat: None
) -> Flat | None:
    """Transfer the state; return its part on ranks that need another one than they have, ``None`` elsewhere.

    Tensors that a rank has already are shared. Where ranks can release something, the state moves in batches
    (``moves.batches``), so that they have room for the rest.

    Args:
        group: the connections of the whole formation.
        roles: the roles, the same on every rank.
        own: returns what this rank holds of the state; called on donors only.
        hold: called between batches with all that this rank holds, to be kept if the group breaks.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if not roles.receivers:
        return None
    mine = own() if group.rank in roles.donors else None
    skeleton = _described(group, roles, mine)
    had = {} if mine is None else dict(mine.by_name)
    del mine
    places, place, in_batches = roles.places, roles.places[group.rank], releases(roles.places)
    changes = group.rank in roles.receivers or place.has != place.needs
    into: dict[str, Held] = {}
    entries = entries_of(skeleton)
    for batch in batches(entries, places) if in_batches else (tuple(entries),):
        new = room_for(batch, lambda entry: range_in(entry, place.needs), had) if changes else []
        _keep(had, new)
        into |= {held.entry.name: held for held in new}
        _move(group, batch, (had, into), places)
        if not in_batches:
            continue
        if changes:
            hold(Flat(skeleton, _most(had, into)))
        group.gather_now([0.0])  # all ranks have received and hold their part of the batch
        if changes:
            for entry in batch:
                had.pop(entry.name, None)
            hold(Flat(skeleton, _most(had, into)))
    return Flat(skeleton, list(into.values())) if changes else None


def _move(
    group: Group, batch: Sequence[Entry], states: Sequence[Mapping[str, Held]], places: Sequence[Holdings]
) -> None:
    """Send and receive the entries of a batch.

    Args:
        group: the connections.
        batch: the entries, the same on every rank.
        states: what this rank has, and where it receives what it lacks, by name of the entry.
        places: what each rank has and needs.
    """
    for routes in rounds(loads_of(batch, places)):
        outgoing: dict[int, list[TensorRange]] = {}
        incoming: dict[int, list[TensorRange]] = {}
        for route in routes:
            if route.source == group.rank:
                outgoing.setdefault(route.to, []).extend(route.ranges)
            if route.to == group.rank:
                incoming.setdefault(route.source, []).extend(route.ranges)
        group.send_receive(
            {peer: _payload(states, ranges) for peer, ranges in outgoing.items()},
            {peer: _payload(states[1:], ranges) for peer, ranges in incoming.items()},
            "a part of the state",
        )


def _includes(has: Holding | None, needs: Holding | None) -> bool:
    """Return whether nothing of ``needs`` is outside of ``has``."""
    if has is None:
        return True
    if needs is None:
        return False
    return all(not own.elements or (name in has and has[name].has(own)) for name, own in needs.items())


def _described(group: Group, roles: Roles, mine: Flat | None) -> bytes:
    """Return the skeleton of the whole state, on every rank."""
    describes = mine is not None and group.rank in roles.describers
    sizes = group.gather_now([float(len(mine.skeleton)) if mine is not None and describes else 0.0])
    skeletons = [
        group.broadcast_bytes(
            mine.skeleton if mine is not None and group.rank == rank else None,
            size_bytes=int(sizes[rank][0]),
            source=rank,
        )
        for rank in roles.describers
    ]
    return merged(skeletons)


def _keep(had: Mapping[str, Held], into: Sequence[Held]) -> None:
    """Copy what this rank holds already."""
    for held in into:
        known = had.get(held.entry.name)
        common = known.own.common(held.own) if known is not None else None
        if known is not None and common is not None and known.values is not held.values:
            held.values_in(common).copy_(known.values_in(common))


def _most(had: Mapping[str, Held], into: Mapping[str, Held]) -> list[Held]:
    """Return all that a rank holds; of an entry that it has twice, the one with more elements."""
    found = dict(had)
    for name, held in into.items():
        if name not in found or held.own.has(found[name].own):
            found[name] = held
    return list(found.values())


def _payload(states: Sequence[Mapping[str, Held]], ranges: Sequence[TensorRange]) -> Payload:
    """Return the memory of bytes of entries, in order.

    A donor's tensors on a device are copied to the host when their turn comes; a receiver's are on the host already.

    Args:
        states: where the bytes may be; the first one that has them counts.
        ranges: bytes that travel between this rank and one other.
    """

    def memory(part: TensorRange) -> memoryview:
        found = (held for state in states if (held := state.get(part.name)) is not None)
        held = next((each for each in found if each.own_bytes.has(part)), None)
        if held is None:  # a StopIteration would end the payload before its size, and the next frame fill the rest
            raise UsageError(
                f"this rank's state lacks {part.name!r}, or a part of it, and that of another rank has it: register "
                "the same objects on every rank, with tensors of the same names and shapes"
            )
        return memory_of(held.bytes_in(part).cpu())

    return Payload(sum(each.elements for each in ranges), map(memory, ranges))
