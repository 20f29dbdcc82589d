"""Checkpoints that ended workers have reported: the last one is often written after the last scrape."""

from __future__ import annotations

from typing import NamedTuple

from heterotrain_core.contract.outcome import decode_outcome

from heterotrain_operator.cluster_state.views import PodView


class SavedCheckpoint(NamedTuple):
    """A complete checkpoint; the newest one is the largest.

    Attributes:
        time_s: when it became complete, in seconds since 1970, by the clock of its worker.
        step: committed steps that it contains.
    """

    time_s: float
    step: int


def saved_by(pod: PodView) -> SavedCheckpoint | None:
    """Return the newest checkpoint in the outcome of an ended pod; ``None`` without an outcome or a checkpoint."""
    outcome = decode_outcome(pod.ended.message) if pod.ended else None
    if outcome is None or outcome.checkpoint_time_s is None or outcome.checkpoint_step is None:
        return None
    return SavedCheckpoint(outcome.checkpoint_time_s, outcome.checkpoint_step)
