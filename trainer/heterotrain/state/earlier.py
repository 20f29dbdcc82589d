"""What a rank holds of the state between two layouts, while parts of it are sent and received."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain.state.holdings import Holding
from heterotrain.state.tensors import Flat


@dataclass(frozen=True, slots=True)
class Earlier:
    """A rank's state between two layouts.

    Attributes:
        flat: the state; its tensors are those of the earlier part of the model, or were received since.
        holding: its parameters and buffers; ``None`` for all of the model's.
    """

    flat: Flat
    holding: Holding | None


def holding_in(flat: Flat) -> Holding:
    """Return which parameters and buffers a state has."""
    return {held.entry.of: held.extent for held in flat.held if held.entry.name.startswith("model.")}
