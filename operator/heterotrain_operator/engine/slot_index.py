"""Free slots for each shape of a worker, kept up to date by the nodes that changed, instead of a look at all nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.decide.workers.capacity import FreeSlots, Shape, slots_on

MOST_SHAPES = 64
"""Shapes that are kept, the ones used last: each keeps a number for each of its nodes."""


@dataclass(slots=True)
class _Entry:
    """The free slots of one shape.

    Attributes:
        seen: changes of nodes that are part of it.
        on: by matching node, its free slots, and whether it is large enough when it is empty.
        slots: sum of the free slots.
        possible: nodes that are large enough.
    """

    seen: int = 0
    on: dict[str, tuple[int, bool]] = field(default_factory=dict)
    slots: int = 0
    possible: int = 0

    def put(self, node: str, found: tuple[int, bool] | None) -> None:
        slots, possible = self.on.pop(node, (0, False))
        self.slots, self.possible = self.slots - slots, self.possible - possible
        if found is not None:
            self.on[node] = found
            self.slots, self.possible = self.slots + found[0], self.possible + found[1]


class SlotIndex:
    """Free slots by shape."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[str, _Entry] = {}

    def free_slots(self, shape: Shape) -> FreeSlots:
        """Return how many more workers of this shape fit; see ``capacity.free_slots``."""
        parts = [shape.requests, shape.node_selector, shape.tolerations, shape.affinity]
        key = json.dumps(parts, sort_keys=True, default=str)
        entry = self._entries.pop(key, None) or _Entry()
        self._entries[key] = entry
        if len(self._entries) > MOST_SHAPES:
            del self._entries[next(iter(self._entries))]
        used = self._store.used()
        for name in self._store.node_changes.since(entry.seen):
            node = self._store.nodes.get(name)
            entry.put(name, slots_on(shape, node, used.get(name, {})) if node is not None else None)
        entry.seen = self._store.node_changes.count
        return FreeSlots(slots=entry.slots, matching_nodes=len(entry.on), possible=entry.possible > 0)
