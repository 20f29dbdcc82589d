"""The time of a share in a pipeline, by simulating its schedule pass by pass.

1F1B: the stage that is p-th from the end starts with p forward passes, then does one backward and one forward pass in
turn, so it keeps p micro-batches. With fewer micro-batches than stages, GPipe: all forward passes, then all backward
passes. The formula ``fill + (n − 1) · slowest stage`` is close for balanced stages only: a slow stage in front hides
stages behind it, and limits of kept micro-batches can hold up unbalanced ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heterotrain_core.layout.result import Stage

MOST_SIMULATED = 256
"""Micro-batches that are simulated one by one. Beyond them, the time grows as it did over the second half."""


class Passes(NamedTuple):
    """Seconds of one micro-batch in one stage, transfers to the stage included."""

    forward_s: float
    backward_s: float


def passes(stages: Sequence[Stage]) -> tuple[Passes, ...]:
    """Return the seconds of both passes in each stage: a stage waits for its bytes, then computes."""
    return tuple(Passes(stage.input_s + stage.forward_s, stage.gradient_s + stage.backward_s) for stage in stages)


def share_seconds(stages: Sequence[Passes], micro_batches: int) -> float:
    """Return the seconds of a share of at least one micro-batch, from the first pass to the last.

    Exact up to ``MOST_SIMULATED`` micro-batches.
    """
    if len(stages) == 1:  # nothing to wait for
        return micro_batches * (stages[0].forward_s + stages[0].backward_s)
    if micro_batches <= MOST_SIMULATED:
        return _simulate(stages, micro_batches)
    half = MOST_SIMULATED // 2
    end_s = _simulate(stages, MOST_SIMULATED)
    period_s = (end_s - _simulate(stages, half)) / (MOST_SIMULATED - half)
    return end_s + (micro_batches - MOST_SIMULATED) * period_s


def order_of(position: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return the passes of one stage in their order: ("F" or "B", micro-batch).

    Args:
        position: of the stage from the end, 1 for the last.
        stages: of the pipeline.
        micro_batches: of the share.
    """
    ahead = micro_batches if micro_batches < stages else position
    order = [("F", index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        order += [("B", index), ("F", index + ahead)]
    return order + [("B", index) for index in range(micro_batches - ahead, micro_batches)]


def _simulate(stages: Sequence[Passes], micro_batches: int) -> float:
    size = len(stages)
    orders = [order_of(size - stage, size, micro_batches) for stage in range(size)]
    done_s: dict[tuple[str, int, int], float] = {}
    free_s = [0.0] * size
    following = [0] * size
    ready = list(range(size - 1, -1, -1))
    while ready:
        stage = ready.pop()
        while following[stage] < len(orders[stage]):
            what, index = orders[stage][following[stage]]
            forward = what == "F"
            source = stage - 1 if forward else stage + 1
            # The last stage turns each micro-batch round; its forward pass precedes in its own order.
            start_s = 0.0 if source in (-1, size) else done_s.get((what, source, index))
            if start_s is None:
                break
            seconds = stages[stage].forward_s if forward else stages[stage].backward_s
            free_s[stage] = done_s[what, stage, index] = max(free_s[stage], start_s) + seconds
            following[stage] += 1
            target = stage + 1 if forward else stage - 1
            if 0 <= target < size and target not in ready:
                ready.append(target)
    return max(free_s)
