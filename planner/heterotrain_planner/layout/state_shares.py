"""State by memory: the fractions of the training state that leave the largest one as small as possible."""

from __future__ import annotations

from collections.abc import Sequence


def state_ratios(room_bytes: Sequence[float], state_bytes: float) -> tuple[float, ...] | None:
    """Return each device's fraction of the state, ``None`` where all rooms together are too small.

    Water-filling: every device holds the same fraction, or all that it has room for. Collectives wait for the largest
    fraction, and no other division has a smaller one.

    Args:
        room_bytes: of each device for state, at least 0.
        state_bytes: at least 0; a state of no bytes is divided evenly.
    """
    if state_bytes <= 0:
        return (1.0 / len(room_bytes),) * len(room_bytes)
    if sum(room_bytes) < state_bytes:
        return None
    left, level = state_bytes, 0.0
    order = sorted(room_bytes)
    for index, room in enumerate(order):
        # All devices from here on have at least this much room.
        level = left / (len(order) - index)
        if room >= level:
            break
        left -= room
    filled = [min(room, level) for room in room_bytes]
    # Rounding errors go to the sum, so that the fractions are those of one whole.
    whole = sum(filled)
    return tuple(part / whole for part in filled)
