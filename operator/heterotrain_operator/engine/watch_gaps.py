"""Notices that a watch was interrupted, from its events: no event reports deletions during the gap."""

from __future__ import annotations

import asyncio


class WatchGaps:
    """Gaps of the watches of all kinds.

    Attributes:
        found: set by a gap; then everything is to be listed again.
    """

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self._streaming: set[str] = set()
        self._listed: dict[str, set[str]] = {}
        """By kind, the uids of the objects in the list with which its watch started."""

    def note(self, kind: str, event_type: str | None, uid: str) -> None:
        """Note an event of a kind; type ``None`` comes from the list with which a watch starts.

        A second such list means that the watch was interrupted: it names an object a second time, or follows other
        events. An empty second list causes no event; objects that are gone are then noticed by the next regular list,
        or when a write finds them missing.
        """
        if event_type is not None:
            self._streaming.add(kind)
            return
        listed = self._listed.setdefault(kind, set())
        if kind in self._streaming or uid in listed:
            self._streaming.discard(kind)
            listed.clear()
            self.found.set()
        listed.add(uid)
