"""Which nodes changed, or the pods on them, since a look at all of them: for sums that are kept up to date."""

from __future__ import annotations

from collections.abc import Iterable


class NodeChanges:
    """Nodes by their last change.

    Attributes:
        count: changes so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[str, int] = {}
        """By node, its last change; the newest is the last entry."""

    def note(self, nodes: Iterable[str]) -> None:
        """Note a change of each of these nodes."""
        for node in nodes:
            self.count += 1
            self._last.pop(node, None)
            self._last[node] = self.count

    def since(self, count: int) -> list[str]:
        """Return the nodes that changed after so many changes, at a cost in proportion to their number."""
        found = []
        for node in reversed(self._last):
            if self._last[node] <= count:
                break
            found.append(node)
        return found
