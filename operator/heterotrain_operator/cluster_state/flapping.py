"""Nodes that lose and regain their readiness again and again, and for how long they are not used. Pure.

Each loss of a node costs a new generation of the plan, a pause of all members, and a worker that is created and removed
again. So a node that was lost a few times within a while is held down: it gets no workers for some time, which doubles
with each further loss and is bounded. The history travels from an operator to its successor as text, so that no
restart puts workers back on such a node.
"""

from __future__ import annotations

import json
import math
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


MOST_KEPT = 500
"""Nodes in the text for a successor: its object may have 256 KiB of annotations."""
_LONGEST_NAME = 253


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

    def to_text(self, *, now_s: float) -> str:
        """Return the losses that may still matter, the latest first, for a successor; empty for none."""
        rows = [
            (max(record.lost_s, record.held_until_s), name, record.flaps, record.lost_s, record.held_until_s)
            for name, record in self._records.items()
            if record.flaps and now_s - max(record.lost_s, record.held_until_s) <= WINDOW_S
        ]
        kept = sorted(rows, reverse=True)[:MOST_KEPT]
        return json.dumps([row[1:] for row in kept], separators=(",", ":")) if kept else ""

    def restore(self, text: str, *, nodes: int, now_s: float) -> tuple[str, ...]:
        """Add the losses that a predecessor noted; return the nodes that are held now and were not before.

        A row that is not one is left out, and no hold ends later than one that begins now could.

        Args:
            text: that of ``to_text``.
            nodes: number of nodes in the cluster.
            now_s: now.
        """
        before = {name for name, record in self._records.items() if record.hold is not None}
        for name, flaps, lost_s, until_s in _rows(text):
            record = self._records.setdefault(name, _Record(ready=False))
            if flaps <= record.flaps:
                continue
            record.flaps, record.lost_s = flaps, min(lost_s, now_s)
            record.held_until_s = min(until_s, now_s + LONGEST_HOLD_S)
            held = sum(each.hold is not None and each is not record for each in self._records.values())
            if record.held_until_s > now_s and held < nodes // LARGEST_PART:
                record.hold = Hold(flaps, record.held_until_s)
        return tuple(n for n, record in self._records.items() if record.hold is not None and n not in before)

    def expired(self, present: Collection[str], *, now_s: float) -> tuple[str, ...]:
        """Return the nodes whose hold is over, and forget nodes that are gone for long."""
        over = tuple(name for name, record in self._records.items() if record.hold and record.hold.until_s <= now_s)
        for name in over:
            self._records[name].hold = None
        for name in [n for n, r in self._records.items() if n not in present and now_s - r.lost_s > LONGEST_HOLD_S]:
            del self._records[name]
        return over


def _rows(text: str) -> list[tuple[str, int, float, float]]:
    """Return the rows of a text that are ones: node, losses, time of the last one, end of the hold."""
    try:
        raw = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    found = []
    for row in raw[:MOST_KEPT] if isinstance(raw, list) else ():
        if not isinstance(row, list) or len(row) != 4:  # noqa: PLR2004  # as above
            continue
        name, flaps, *times_s = row
        sound = isinstance(name, str) and len(name) <= _LONGEST_NAME and type(flaps) is int and 0 < flaps <= MOST_KEPT
        if sound and all(type(each) in (int, float) and math.isfinite(each) for each in times_s):
            found.append((name, flaps, float(times_s[0]), float(times_s[1])))
    return found
