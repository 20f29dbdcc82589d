"""The sockets of one formation, among all those of the process: which are its own, and which break it when they close.

Gloo and NCCL open connections without naming them, so a group counts as its own what was opened while it connected.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from heterotrain.network.gloo.abort import OpenSocket, connected, cut, is_open, open_sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketFilter:
    """Distinguishes a group's sockets from all others of the process.

    Attributes:
        members: the members' IP addresses; empty where they are not known.
        excluded_ports: a connection with one of these ports on either side does not belong to the group.
    """

    members: frozenset[str]
    excluded_ports: frozenset[int]


class PeerSockets:
    """Sockets of a group; ``cut`` may be called from any thread."""

    def __init__(self, which: SocketFilter, *, before: frozenset[OpenSocket] | None) -> None:
        """Note the sockets that are not the group's.

        Args:
            which: distinguishes the group's sockets from others.
            before: sockets that were open before the group's first one; ``None`` for those that are open now.
        """
        self.before = open_sockets() if before is None else before
        self.excluded_ports = which.excluded_ports
        self._which = which
        self._own: frozenset[OpenSocket] | None = None
        self._watched: frozenset[OpenSocket] = frozenset()
        self._lock = threading.Lock()

    @property
    def addresses(self) -> frozenset[str]:
        """Remote addresses of the group's connections; a store on this rank's own host is reached over loopback."""
        return self._which.members | {"127.0.0.1", "::1"}

    def own(self, before: frozenset[OpenSocket], watched: frozenset[OpenSocket] | None, *, store_port: int) -> None:
        """Count all sockets that were opened since ``before`` as the group's; the end of a watched one breaks it.

        Args:
            before: sockets that were open then.
            watched: sockets that may be watched; ``None`` for all that were opened.
            store_port: of the group's store, which may close while the group is intact.
        """
        opened = open_sockets() - before
        with self._lock:
            self._own = opened | (self._own or frozenset())
        # Without the store's sockets and those of other threads or of NCCL, which may close while the group is intact.
        self._watched |= connected(
            opened if watched is None else opened & watched,
            addresses=self.addresses if self._which.members else None,
            excluded_ports=self.excluded_ports | {store_port},
        )

    def is_one_closed(self) -> bool:
        """Return whether this process has closed a watched connection, as gloo does when it broke."""
        return not all(map(is_open, self._watched))

    def cut(self) -> int:
        """Shut down the group's connections and return their number; before they are known, all newer sockets."""
        with self._lock:
            candidates = self._own if self._own is not None else open_sockets() - self.before
        return cut(candidates, addresses=self.addresses, excluded_ports=self.excluded_ports)
