"""The time of a share in a pipeline, by simulating its schedule pass by pass.

1F1B: the stage that is p-th from the end starts with p forward passes, then does one backward and one forward pass in
turn, so it keeps p micro-batches, or all of a share that has fewer. The formula ``fill + (n − 1) · slowest stage`` is
close for balanced stages only: a slow stage in front hides stages behind it, and limits of kept micro-batches can hold
up unbalanced ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heterotrain_planner.layout.result import PlannedStage

MOST_SIMULATED = 256
"""Micro-batches that are simulated one by one. Then the time grows as over the second half, or by the slowest stage."""
_ROUNDING = 1e-12
"""Relative difference of times that counts as rounding."""


class Passes(NamedTuple):
    """Seconds of one micro-batch in one stage, transfers to the stage included."""

    forward_s: float
    backward_s: float


def passes(stages: Sequence[PlannedStage]) -> tuple[Passes, ...]:
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
    return end_s + (micro_batches - MOST_SIMULATED) * max(period_s, *map(sum, stages))


class TimedPass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    stage: int
    forward: bool
    micro_batch: int
    start_s: float
    end_s: float


def timeline(stages: Sequence[Passes], micro_batches: int) -> list[TimedPass]:
    """Return every pass of a share in the order of its start; for pictures, because ``share_seconds`` is faster."""
    size = len(stages)
    ends: dict[tuple[int, bool, int], float] = {}
    found: list[TimedPass] = []
    free_s = [0.0] * size
    orders = [_order(size - stage, micro_batches) for stage in range(size)]
    waiting = list(range(size))
    while waiting:
        for stage in waiting:
            while orders[stage]:
                forward, index = orders[stage][0]
                source = stage - 1 if forward else stage + 1
                ready_s = 0.0 if source in (-1, size) else ends.get((source, forward, index))
                if ready_s is None:
                    break
                orders[stage].pop(0)
                start_s = max(free_s[stage], ready_s)
                seconds = stages[stage].forward_s if forward else stages[stage].backward_s
                free_s[stage] = ends[stage, forward, index] = start_s + seconds
                found.append(TimedPass(stage, forward, index, start_s, start_s + seconds))
        waiting = [stage for stage in waiting if orders[stage]]
    return sorted(found, key=lambda each: (each.start_s, each.stage))


def _order(position: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Return the passes (forward, micro-batch) of the stage that is ``position``-th from the end, in their order."""
    ahead = min(micro_batches, position)
    order = [(True, index) for index in range(ahead)]
    for index in range(micro_batches - ahead):
        order += [(False, index), (True, index + ahead)]
    return order + [(False, index) for index in range(micro_batches - ahead, micro_batches)]


def _simulate(stages: Sequence[Passes], micro_batches: int) -> float:
    """Return the end of the last pass.

    Round i runs the backward passes of micro-batch i, from the last stage to the first, then each stage's next forward
    pass. All of it follows from the ends of the forward passes of the round before. So once every stage ends a round
    later than the one before by the same time, it does so until the first stage has no forward pass left.
    """
    size = len(stages)
    if micro_batches == 1:
        return sum(forward_s + backward_s for forward_s, backward_s in stages)
    if micro_batches < size:
        return max(each.end_s for each in timeline(stages, micro_batches))
    ended = _fill(stages)
    skipped_s, index = 0.0, 0
    backwards = [(stage, stages[stage].backward_s) for stage in range(size - 1, -1, -1)]
    while index < micro_batches:
        then, turned_s = ended.copy(), 0.0
        for stage, backward_s in backwards:
            turned_s = (max(turned_s, ended[stage])) + backward_s
            then[stage] = turned_s
        # The forward pass of the stage in front ended one round earlier; the first stage has none in front.
        for stage in range(max(0, index + size - micro_batches + 1), size):  # the others have no forward pass left
            arrived_s = ended[stage - 1] if stage else 0.0
            then[stage] = (max(then[stage], arrived_s)) + stages[stage].forward_s
        left = micro_batches - size - 1 - index
        if left > 0:
            steps = [new_s - old_s for new_s, old_s in zip(then, ended, strict=True)]
            if max(steps) - min(steps) <= _ROUNDING * steps[0]:
                skipped_s += left * steps[0]
                index += left
        ended, index = then, index + 1
    return max(ended) + skipped_s


def _fill(stages: Sequence[Passes]) -> list[float]:
    """Return when each stage has run the forward passes that precede its first backward pass."""
    ends = [0.0] * len(stages)  # of the stage in front, by micro-batch
    last = []
    for position, stage in zip(range(len(stages), 0, -1), stages, strict=True):
        end_s = 0.0
        for index in range(position):
            end_s = ends[index] = max(end_s, ends[index]) + stage.forward_s
        last.append(end_s)
    return last
