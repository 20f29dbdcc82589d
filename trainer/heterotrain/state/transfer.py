"""Transfer of the state from ranks that have it to ranks that lack it, right after a formation has connected.

Every rank reports what it holds. All derive the same ``roles`` from the reports and compute the same ``routes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Payload
from heterotrain.state.parts import byte_ranges, byte_view, memory_of, sizes_bytes
from heterotrain.state.routes import Route, rounds
from heterotrain.state.tensors import Flat, empty_like_skeleton


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
    """

    steps: int
    hooked: int = 0
    evaluated: int
    checkpoint_generation: int = -1
    checkpoint_step: int = -1
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Senders and receivers of the state, as ranks in the group.

    Attributes:
        leader: the donor whose values count wherever all ranks need the same one.
        donors: ranks that hold the newest state (only the leader when no rank had any).
        receivers: ranks that need it.
        cold_start: no rank has state: the leader starts from its checkpoint, or from the beginning.
    """

    leader: int
    donors: tuple[int, ...]
    receivers: tuple[int, ...]
    cold_start: bool


def assign_roles(summaries: Sequence[StateSummary]) -> Roles:
    """Return donors and receivers: the newest state wins, else the best checkpoint, else the lowest rank.

    Of two states after the same step, the one whose hooks have run is the newer: they may have changed it.
    """
    newest = max((h.steps, h.hooked, h.evaluated) for h in summaries)
    if newest[0] < 0:
        leader = max(
            range(len(summaries)),
            key=lambda rank: (summaries[rank].checkpoint_generation, summaries[rank].checkpoint_step, -rank),
        )
        others = tuple(rank for rank in range(len(summaries)) if rank != leader)
        return Roles(leader=leader, donors=(leader,), receivers=others, cold_start=True)
    donors = tuple(rank for rank, h in enumerate(summaries) if (h.steps, h.hooked, h.evaluated) == newest)
    receivers = tuple(rank for rank in range(len(summaries)) if rank not in donors)
    return Roles(leader=donors[0], donors=donors, receivers=receivers, cold_start=False)


def exchange(group: Group, roles: Roles, own: Callable[[], Flat]) -> Flat | None:
    """Transfer the state; return it on receivers, ``None`` elsewhere.

    Args:
        group: the connections of the whole formation.
        roles: the roles, the same on every rank.
        own: returns this rank's state as skeleton and tensors; called on donors only.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if not roles.receivers:
        return None
    mine = own() if group.rank in roles.donors else None
    skeleton = mine.skeleton if mine is not None and group.rank == roles.leader else b""
    sizes = group.gather_now([float(len(skeleton))])
    skeleton = group.broadcast_bytes(skeleton or None, size_bytes=int(sizes[roles.leader][0]), source=roles.leader)
    flat = mine or empty_like_skeleton(skeleton)
    lengths_bytes = sizes_bytes(flat.tensors)
    for routes in rounds(sum(lengths_bytes), donors=roles.donors, receivers=roles.receivers):
        outgoing = {r.to: _payload(flat, lengths_bytes, r) for r in routes if r.source == group.rank}
        incoming = {r.source: _payload(flat, lengths_bytes, r) for r in routes if r.to == group.rank}
        group.send_receive(outgoing, incoming, "a part of the state")
    return None if mine is not None else flat


def _payload(flat: Flat, lengths_bytes: Sequence[int], route: Route) -> Payload:
    """Return the memory of a route's bytes.

    A donor's tensors on a device are copied to the host when their turn comes; a receiver's are on the host already.
    """
    return Payload(
        route.stop - route.start,
        (
            memory_of(byte_view(flat.tensors[byte_range.tensor])[byte_range.start : byte_range.stop].cpu())
            for byte_range in byte_ranges(lengths_bytes, route.start, route.stop)
        ),
    )
