"""The order of passes on one stage of a pipeline: one forward, one backward (1F1B). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Pass(Enum):
    """What is computed."""

    FORWARD = "forward"
    BACKWARD = "backward"


def passes(*, stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Pass, int]]:
    """Yield passes and their micro-batches, in order.

    A stage that is p-th from the end keeps the activations of at most p micro-batches.

    Args:
        stage: from 0.
        stages: of the pipeline.
        micro_batches: at least 0.
    """
    ahead = min(micro_batches, stages - stage)
    for index in range(ahead):
        yield Pass.FORWARD, index
    for index in range(micro_batches):
        yield Pass.BACKWARD, index
        if ahead + index < micro_batches:
            yield Pass.FORWARD, ahead + index
