"""State moves from those who have it to those who lack it, right after a formation's groups stand.

Every rank says what it holds; all draw the same conclusion. When several ranks hold the state, each sends a part of it
to each receiver; when only one does, it broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterotrain.network.group import Group
from heterotrain.state.parts import byte_view, cut, sizes_bytes
from heterotrain.state.tensors import Flat, empty_like_skeleton


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds: its committed steps and hooks (-1 when it has no state), and its best checkpoint on disk."""

    steps: int
    evaluated: int
    checkpoint_generation: int = -1
    checkpoint_step: int = -1
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who gives and who takes, as ranks in the group.

    Attributes:
        leader: decides everything else that has to be the same; it gives, too.
        donors: hold the newest state (only the leader when nobody had any).
        receivers: have to take it.
        fresh: nobody has state: the leader begins from its checkpoint, or anew.
    """

    leader: int
    donors: tuple[int, ...]
    receivers: tuple[int, ...]
    fresh: bool


def roles(holdings: Sequence[Holding]) -> Roles:
    """Decide who gives and who takes: the most committed steps win, then the best checkpoint, then the lowest rank."""
    newest = max((h.steps, h.evaluated) for h in holdings)
    if newest[0] < 0:
        leader = max(
            range(len(holdings)),
            key=lambda rank: (holdings[rank].checkpoint_generation, holdings[rank].checkpoint_step, -rank),
        )
        others = tuple(rank for rank in range(len(holdings)) if rank != leader)
        return Roles(leader=leader, donors=(leader,), receivers=others, fresh=True)
    donors = tuple(rank for rank, h in enumerate(holdings) if h.steps == newest[0])
    leader = next(rank for rank, h in enumerate(holdings) if (h.steps, h.evaluated) == newest)
    receivers = tuple(rank for rank in range(len(holdings)) if rank not in donors)
    return Roles(leader=leader, donors=donors, receivers=receivers, fresh=False)


def exchange(group: Group, who: Roles, own: Callable[[], Flat]) -> Flat | None:
    """Move the state; return it on receivers, ``None`` elsewhere.

    Args:
        group: a whole formation's connections.
        who: the same on every rank.
        own: takes this rank's state apart; called on donors only.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if not who.receivers:
        return None
    mine = own() if group.rank in who.donors else None
    skeleton = mine.skeleton if mine is not None and group.rank == who.leader else b""
    sizes = group.gather_now([float(len(skeleton))])
    skeleton = group.broadcast_bytes(skeleton or None, size=int(sizes[who.leader][0]), source=who.leader)
    flat = mine or empty_like_skeleton(skeleton)
    if len(who.donors) == 1:
        for tensor in flat.tensors:
            if tensor.numel():
                group.broadcast(byte_view(tensor.cpu()), source=who.leader)  # a receiver's are on the CPU: no copies
    elif mine is not None:
        _give(group, who, mine)
    elif group.rank in who.receivers:
        _take(group, who, flat)
    return None if mine is not None else flat


def _give(group: Group, who: Roles, flat: Flat) -> None:
    """Send this donor's part of the state, a tensor's stretch at a time, to every receiver."""
    part = cut(sizes_bytes(flat.tensors), len(who.donors))[who.donors.index(group.rank)]
    wires = [byte_view(flat.tensors[stretch.tensor])[stretch.start : stretch.stop].cpu() for stretch in part]
    for work in [group.send(wire, to=receiver) for receiver in who.receivers for wire in wires]:
        group.wait(work, "a part of the state")


def _take(group: Group, who: Roles, flat: Flat) -> None:
    """Receive every donor's part into the place where it belongs."""
    wires = [byte_view(tensor) for tensor in flat.tensors]
    works = [
        group.receive(wires[stretch.tensor][stretch.start : stretch.stop], source=donor)
        for donor, part in zip(who.donors, cut(sizes_bytes(flat.tensors), len(who.donors)), strict=True)
        for stretch in part
    ]
    for work in works:
        group.wait(work, "a part of the state")
