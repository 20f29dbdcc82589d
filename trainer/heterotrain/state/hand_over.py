"""Hands over: ranks that leave a divided model pass their parts on, while all ranks are still connected.

A part of the state that only leaving ranks hold would be gone with them. Those that stay take it over, for the layout
that comes next: each takes what it will need then. What none of them will need, because a rank that is about to join
gets it, is kept by those with the most room. The next formation's transfer moves it on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from heterotrain.network.group import Group
from heterotrain.network.texts import gather_texts
from heterotrain.state import transfer
from heterotrain.state.ranges import Holding, TensorRange, missing
from heterotrain.state.training import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverReport:
    """What one rank tells the others before a part of the state is handed over.

    Attributes:
        wants: parameters and buffers of its next part of the model.
        room_bytes: memory for what is not among them.
        sizes_bytes: of the whole state of each parameter or buffer of which it holds something.
    """

    wants: Collection[str]
    room_bytes: int
    sizes_bytes: Mapping[str, int]


def orphans(holdings: Sequence[Holding | None], staying: Collection[int]) -> dict[str, TensorRange]:
    """Return the parameters and buffers of which the staying ranks do not hold everything together, whole.

    Args:
        holdings: of each rank of the formation; ``None`` for everything.
        staying: the ranks that stay.
    """
    if any(holdings[rank] is None for rank in staying):
        return {}
    sizes: dict[str, int] = {}
    for holding in holdings:
        for name, own in (holding or {}).items():
            sizes[name] = max(own.stop, sizes.get(name, 0))
    kept = [holding for rank in staying if (holding := holdings[rank]) is not None]
    return {name: TensorRange(name, 0, sizes[name]) for name in missing(sizes, kept)}


def heirs(
    alone: Collection[str], reports: Mapping[int, HandOverReport], sizes_bytes: Mapping[str, int]
) -> dict[int, tuple[str, ...]] | None:
    """Return what each staying rank takes over, or ``None`` if they have no room for it.

    Args:
        alone: parameters and buffers that only leaving ranks hold.
        reports: of the staying ranks.
        sizes_bytes: of the state of each of these parameters and buffers.
    """
    taken: dict[int, list[str]] = {rank: [] for rank in reports}
    room = {rank: report.room_bytes for rank, report in reports.items()}
    unwanted = []
    for name in sorted(alone, key=lambda name: (-sizes_bytes.get(name, 0), name)):
        wanting = [rank for rank, report in reports.items() if name in report.wants]
        for rank in wanting:
            taken[rank].append(name)
            room[rank] -= sizes_bytes.get(name, 0)
        if not wanting:
            unwanted.append(name)
    for name in unwanted:
        most = max(room, key=lambda rank: (room[rank], -rank))
        room[most] -= sizes_bytes.get(name, 0)
        if room[most] < 0:
            return None
        taken[most].append(name)
    return {rank: tuple(names) for rank, names in taken.items()}


def hand_over(
    group: Group, training: TrainState, *, staying: Collection[int], wants: Collection[str], room_bytes: int
) -> bool:
    """Pass on what only leaving ranks hold; return whether the staying ranks hold the whole state now.

    All ranks of the formation call this between two steps. Afterwards the formation is over: the next one gives each
    rank its part of what it holds.

    Args:
        group: the connections of the whole formation.
        training: the state.
        staying: ranks in the group that stay; at least one.
        wants: parameters and buffers of this rank's next part of the model, as far as it is known.
        room_bytes: memory of this rank for what is not among them.

    Raises:
        PeerLost: the group broke meanwhile. A staying rank keeps what it has received.
    """
    holdings = training.holdings
    alone = orphans(holdings, staying)
    if not alone:
        return True
    own: dict[str, int] = {}
    for held in training.flat().held:
        if held.entry.of in alone:
            own[held.entry.of] = own.get(held.entry.of, 0) + held.entry.size_bytes
    wanted = sorted(alone.keys() & set(wants))
    reports = _exchanged(group, HandOverReport(wants=wanted, room_bytes=room_bytes, sizes_bytes=own))
    sizes: dict[str, int] = {}
    for report in reports:
        for name, size in report.sizes_bytes.items():
            sizes[name] = max(size, sizes.get(name, 0))
    taken = heirs(alone.keys(), {rank: reports[rank] for rank in sorted(staying)}, sizes)
    if taken is None:
        return False
    after = [
        holding if holding is None else dict(holding) | {name: alone[name] for name in taken.get(rank, ())}
        for rank, holding in enumerate(holdings)
    ]
    steps, hooked, evaluated = training.progress.order
    summaries = [
        transfer.StateSummary(steps=steps, hooked=hooked, evaluated=evaluated, has=has, needs=needs)
        for has, needs in zip(holdings, after, strict=True)
    ]
    transfer.exchange(group, transfer.assign_roles(summaries), training.flat, hold=training.hold)
    return True


def _exchanged(group: Group, report: HandOverReport) -> list[HandOverReport]:
    """Return every rank's report, by rank."""
    text = json.dumps([list(report.wants), report.room_bytes, dict(report.sizes_bytes)]).encode()
    rows = [json.loads(row) for row in gather_texts(group, text, "what ranks can take over")]
    return [HandOverReport(wants=set(wants), room_bytes=int(room), sizes_bytes=sizes) for wants, room, sizes in rows]
