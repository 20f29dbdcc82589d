"""State moves from those who have it to those who lack it, right after a formation's groups stand.

Every rank says what it holds; all draw the same conclusion. When several ranks hold the state, each sends a part of it
to each receiver; when only one does, it broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from heterotrain.group import Group
from heterotrain.state import Flat, empty_like_skeleton


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


def assign(sizes_bytes: Sequence[int], donors: Sequence[int]) -> tuple[int, ...]:
    """Return the donor of each tensor so that donors send nearly equal amounts: largest first, to whoever has least."""
    load = dict.fromkeys(donors, 0)
    chosen = [donors[0]] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        donor = min(donors, key=lambda d: (load[d], d))
        load[donor] += sizes_bytes[index]
        chosen[index] = donor
    return tuple(chosen)


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
            wire = _wire(tensor)
            group.broadcast(wire, source=who.leader)
            if mine is None:
                _copy_back(wire, tensor)
    elif mine is not None:
        _give(group, who, mine)
    elif group.rank in who.receivers:
        _take(group, who, flat)
    return None if mine is not None else flat


def _give(group: Group, who: Roles, flat: Flat) -> None:
    owner = assign([t.numel() * t.element_size() for t in flat.tensors], who.donors)
    works, kept = [], []
    for receiver in who.receivers:
        for tensor, donor in zip(flat.tensors, owner, strict=True):
            if donor == group.rank and tensor.numel():
                wire = _wire(tensor)
                kept.append(wire)
                works.append(group.send(wire, to=receiver))
    for work in works:
        group.wait(work)


def _take(group: Group, who: Roles, flat: Flat) -> None:
    owner = assign([t.numel() * t.element_size() for t in flat.tensors], who.donors)
    pending = []
    for tensor, donor in zip(flat.tensors, owner, strict=True):
        if tensor.numel():
            wire = _wire(tensor)
            pending.append((group.receive(wire, source=donor), wire, tensor))
    for work, wire, tensor in pending:
        group.wait(work)
        _copy_back(wire, tensor)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a contiguous CPU tensor; shares memory with it where possible."""
    flat = tensor.contiguous().cpu().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def _copy_back(wire: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.numel() and wire.data_ptr() != tensor.data_ptr():
        tensor.copy_(wire.view(tensor.dtype).view_as(tensor))
