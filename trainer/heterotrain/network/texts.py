"""Texts of all ranks, which may differ in length."""

from __future__ import annotations

from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose


def gather_texts(group: Group, own: bytes, what: str, *, purpose: Purpose = Purpose.LIBRARY) -> list[bytes]:
    """Return the texts of all ranks, by rank; shorter ones are followed by spaces.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    longest = int(max(row[0] for row in group.gather_now([float(len(own))], purpose)))
    gathering = group.gather(own.ljust(longest), purpose)
    group.wait(gathering, what)
    return gathering.rows
