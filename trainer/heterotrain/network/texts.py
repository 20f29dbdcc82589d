"""Texts of all ranks, which may differ in length."""

from __future__ import annotations

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose

MOST_BYTES = 64 * 1024 * 1024
"""Limit for each text. What a rank holds of a model is among the longest: about 60 bytes for each parameter."""


def gather_texts(group: Group, own: bytes, what: str, *, purpose: Purpose = Purpose.LIBRARY) -> list[bytes]:
    """Return the texts of all ranks, by rank; shorter ones are followed by spaces.

    Args:
        group: the ranks, all of which have to call this at the same point.
        own: this rank's text.
        what: the text is about, for messages.
        purpose: of the exchange.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: a text is too long; on every rank, and before there is memory for it.
    """
    longest = int(max(row[0] for row in group.gather_now([float(len(own))], purpose)))
    if longest > MOST_BYTES:
        raise UsageError(f"{what} takes {longest} bytes on a rank, and at most {MOST_BYTES} are possible")
    gathering = group.gather(own.ljust(longest), purpose)
    group.wait(gathering, what)
    return gathering.rows
