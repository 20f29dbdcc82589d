"""Transfer of the state from ranks that have it to ranks that lack it, right after a formation has connected.

Every rank reports what it holds and what it needs. All derive the same ``roles`` from the reports and compute the same
``routes``. A rank that has the newest state but needs other parts of it, because its layout has changed, receives what
it lacks and keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Payload
from heterotrain.state.holdings import Extent, Holding, overlap
from heterotrain.state.loads import EntryBytes, Holdings, covering, extent_in, loads_of
from heterotrain.state.moves import batches, releases
from heterotrain.state.parts import byte_ranges, byte_view, memory_of
from heterotrain.state.routes import Route, rounds
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
        cold_start: no rank has state: the leader starts from its checkpoint, or from the beginning.
        lost: ranks have state, but nobody has some part of it, at any step.
    """

    leader: int
    donors: tuple[int, ...]
    receivers: tuple[int, ...]
    describers: tuple[int, ...] = ()
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
            for name, extent in (holding or {}).items():
                known[name] = max(extent.stop, known.get(name, 0))  # the first holders may have the first elements only
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
            return Roles(leader=describers[0], donors=tuple(held), receivers=receivers, describers=describers)
    ranked = sorted(
        range(len(summaries)),
        key=lambda rank: (-summaries[rank].checkpoint_generation, -summaries[rank].checkpoint_step, rank),
    )
    donors = covering(whole, {rank: summaries[rank].needs for rank in ranked}) or (ranked[0],)
    lost = any(summary.steps >= 0 for summary in summaries)
    others = tuple(rank for rank in range(len(summaries)) if rank not in donors)
    return Roles(leader=donors[0], donors=donors, receivers=others, describers=donors, cold_start=not lost, lost=lost)


def places_of(roles: Roles, summaries: Sequence[StateSummary]) -> tuple[Holdings, ...]:
    """Return what each rank has and needs, by rank."""
    return tuple(
        Holdings(
            has=summary.needs if roles.cold_start else summary.has, needs=summary.needs, is_donor=rank in roles.donors
        )
        for rank, summary in enumerate(summaries)
    )


def part_of(flat: Flat, needs: Holding | None) -> Flat:
    """Return what a rank needs of its own state, all of which it has; tensors of parameters are shared, not copied."""
    into = room_for(entries_of(flat.skeleton), lambda entry: extent_in(entry, needs), flat.by_name)
    _keep(flat.by_name, into)
    return Flat(flat.skeleton, into)


def exchange(
    group: Group,
    roles: Roles,
    own: Callable[[], Flat],
    places: Sequence[Holdings] | None = None,
    *,
    hold: Callable[[Flat], None] = lambda _flat: None,
) -> Flat | None:
    """Transfer the state; return its part on ranks that need another one than they have, ``None`` elsewhere.

    Tensors that a rank has already are shared. Where ranks can release something, the state moves in batches
    (``moves.batches``), so that they have room for the rest.

    Args:
        group: the connections of the whole formation.
        roles: the roles, the same on every rank.
        own: returns what this rank holds of the state; called on donors only.
        places: what each rank has and needs; by default, donors have everything, and all ranks need it.
        hold: called between batches with all that this rank holds, to be kept if the group breaks.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if not roles.receivers:
        return None
    if places is None:
        places = tuple(Holdings(is_donor=rank in roles.donors) for rank in range(group.world_size))
    mine = own() if group.rank in roles.donors else None
    skeleton = _described(group, roles, mine)
    had = {} if mine is None else dict(mine.by_name)
    del mine
    place, in_batches = places[group.rank], releases(places)
    changes = group.rank in roles.receivers or place.has != place.needs
    into: dict[str, Held] = {}
    entries = entries_of(skeleton)
    for batch in batches(entries, places) if in_batches else (tuple(entries),):
        new = room_for(batch, lambda entry: extent_in(entry, place.needs), had) if changes else []
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
    loads = loads_of(batch, places)
    spans = list(loads.values())
    for routes in rounds(list(loads)):
        outgoing = _by_peer((r.to, r) for r in routes if r.source == group.rank)
        incoming = _by_peer((r.source, r) for r in routes if r.to == group.rank)
        group.send_receive(
            {peer: _payload(states, spans, own_routes) for peer, own_routes in outgoing.items()},
            {peer: _payload(states[1:], spans, own_routes) for peer, own_routes in incoming.items()},
            "a part of the state",
        )


def _includes(has: Holding | None, needs: Holding | None) -> bool:
    """Return whether nothing of ``needs`` is outside of ``has``."""
    if has is None:
        return True
    if needs is None:
        return False
    nothing = Extent(0, 0)
    return all(
        not extent.elements or overlap(extent, has.get(name, nothing)) == extent for name, extent in needs.items()
    )


def _described(group: Group, roles: Roles, mine: Flat | None) -> bytes:
    """Return the skeleton of the whole state, on every rank."""
    describers = roles.describers or (roles.leader,)
    describes = mine is not None and group.rank in describers
    sizes = group.gather_now([float(len(mine.skeleton)) if mine is not None and describes else 0.0])
    skeletons = [
        group.broadcast_bytes(
            mine.skeleton if mine is not None and group.rank == rank else None,
            size_bytes=int(sizes[rank][0]),
            source=rank,
        )
        for rank in describers
    ]
    return merged(skeletons)


def _keep(had: Mapping[str, Held], into: Sequence[Held]) -> None:
    """Copy what this rank holds already."""
    for held in into:
        known = had.get(held.entry.name)
        common = overlap(known.extent, held.extent) if known is not None else None
        if known is not None and common is not None and known.values is not held.values:
            _elements(held, common).copy_(_elements(known, common))


def _most(had: Mapping[str, Held], into: Mapping[str, Held]) -> list[Held]:
    """Return all that a rank holds; of an entry that it has twice, the one with more elements."""
    found = dict(had)
    for name, held in into.items():
        if name not in found or overlap(found[name].extent, held.extent) == found[name].extent:
            found[name] = held
    return list(found.values())


def _elements(held: Held, extent: Extent) -> torch.Tensor:
    return held.values.reshape(-1)[extent.start - held.extent.start : extent.stop - held.extent.start]


def _by_peer(pairs: Iterable[tuple[int, Route]]) -> dict[int, list[Route]]:
    found: dict[int, list[Route]] = {}
    for peer, route in pairs:
        found.setdefault(peer, []).append(route)
    return found


def _payload(
    states: Sequence[Mapping[str, Held]], spans: Sequence[Sequence[EntryBytes]], routes: Sequence[Route]
) -> Payload:
    """Return the memory of the bytes of some routes, in the order of the routes.

    A donor's tensors on a device are copied to the host when their turn comes; a receiver's are on the host already.

    Args:
        states: where the bytes may be; the first one that has them counts.
        spans: the bytes of each load.
        routes: between this rank and one other.
    """
    return Payload(
        sum(route.stop - route.start for route in routes),
        (view for route in routes for view in _views(states, spans[route.load], route)),
    )


def _views(states: Sequence[Mapping[str, Held]], spans: Sequence[EntryBytes], route: Route) -> Iterator[memoryview]:
    for part in byte_ranges([of.elements for _, of in spans], route.start, route.stop):
        entry, of = spans[part.tensor]
        start, stop = of.start + part.start, of.start + part.stop
        held = next(held for state in states if (held := state.get(entry.name)) is not None and _has(held, start, stop))
        first = held.start_byte
        yield memory_of(byte_view(held.values)[start - first : stop - first].cpu())


def _has(held: Held, start: int, stop: int) -> bool:
    size = held.entry.dtype.itemsize
    return held.extent.start * size <= start and stop <= held.extent.stop * size
