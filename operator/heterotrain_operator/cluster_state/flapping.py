"""Nodes that lose and regain their readiness again and again, and for how long they are not used. Pure.

Each loss of a node costs a new generation of the plan, a pause of all members, and a worker that is created and removed
again. So a node that was lost a few times within a while is held down: it gets no workers for some time, which doubles
with each further loss and is bounded. Losing this history loses only the holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

FLAPS = 3
"""Losses of readiness after which a node is held down."""
WINDOW_S = 600.0
"""A loss later than this after the one before, and after the hold, starts the count anew."""
FIRST_HOLD_S = 120.0
LONGEST_HOLD_S = 1800.0
LARGEST_PART = 3
"""At most one of so many nodes is held down: where all of them flap, the fault is elsewhere, and jobs need nodes."""


class Hold(NamedTuple):
    """A node is not used until ``until_s`` (seconds since the epoch), because it was lost ``flaps`` times."""

    flaps: int
    until_s: float


@dataclass(slots=True)
class _Record:
    ready: bool
    flaps: int = 0
    lost_s: float = 0.0
    hold: Hold | None = None
    held_until_s: float = 0.0


class FlapHistory:
    """The losses of readiness of all nodes."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def note(self, name: str, *, ready: bool, nodes: int, now_s: float) -> Hold | None:
        """Note whether a node is ready now, and return its hold, if any.

        Args:
            name: of the node.
            ready: whether it is; a node that is gone is not.
            nodes: number of nodes in the cluster.
            now_s: now.
        """
        record = self._records.setdefault(name, _Record(ready=ready))
        if record.ready and not ready:
            since_s = max(record.lost_s, record.held_until_s)
            record.flaps = record.flaps + 1 if record.flaps and now_s - since_s <= WINDOW_S else 1
            record.lost_s = now_s
            held = sum(each.hold is not None and each is not record for each in self._records.values())
            if record.flaps >= FLAPS and held < nodes // LARGEST_PART:
                hold_s = min(LONGEST_HOLD_S, FIRST_HOLD_S * 2.0 ** min(record.flaps - FLAPS, 10))
                record.held_until_s = now_s + hold_s
                record.hold = Hold(record.flaps, record.held_until_s)
        record.ready = ready
        if record.hold is not None and record.hold.until_s <= now_s:
            record.hold = None
        return record.hold

    def expired(self, present: Collection[str], *, now_s: float) -> tuple[str, ...]:
        """Return the nodes whose hold is over, and forget nodes that are gone for long."""
        over = tuple(name for name, record in self._records.items() if record.hold and record.hold.until_s <= now_s)
        for name in over:
            self._records[name].hold = None
        for name in [n for n, r in self._records.items() if n not in present and now_s - r.lost_s > LONGEST_HOLD_S]:
            del self._records[name]
        return over
