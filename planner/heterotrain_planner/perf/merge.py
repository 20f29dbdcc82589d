"""Merges old observations, so that the number kept per member is bounded and hours of training stay cheap to fit.

The newest scrapes stay unchanged, because changes of speed are found in them. Older scrapes are merged over blocks of
some dozens of steps, shape by shape; means and variances are those of all merged steps together. Scrapes with a change
of speed between them are not merged, because the mean of two speeds means nothing. Very old observations are dropped,
except for the newest one of each share that was not used since: without it, the slope would be lost after thousands of
steps with one share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from heterotrain_planner.perf.counters import MeanVariance, Observation

RECENT_STEPS = 60
"""Last steps whose scrapes stay unchanged: three times the steps in which a change of speed is found."""
BLOCK_STEPS = 40
"""Steps of a merged block, up to the end of its last scrape."""
MOST_STEPS = 3000
"""Steps that are kept: five half-lives of an observation's weight in a fit."""
MOST_OLD_SIZES = 8
"""Shares not used since of which an observation is kept, the newest ones."""
_SAME_SPEED_RATIO = 1.15
"""Ratio of times at one shape up to which two scrapes may be merged."""


def merge_old(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return one member's observations, oldest first, with old ones merged; merging again changes nothing."""
    scrapes = [tuple(scrape) for _, scrape in groupby(observations, key=lambda o: o.ended_s)]
    recent: list[tuple[Observation, ...]] = []
    while scrapes and _steps(recent) < RECENT_STEPS:
        recent.insert(0, scrapes.pop())
    blocks: list[tuple[Observation, ...]] = []
    open_block: list[tuple[Observation, ...]] = []
    for scrape in scrapes:
        if open_block and (_steps(open_block) >= BLOCK_STEPS or not _alike(open_block, scrape)):
            blocks.append(_merged(open_block))
            open_block = []
        open_block.append(scrape)
    if open_block:
        blocks.append(_merged(open_block))
    dropped: list[tuple[Observation, ...]] = []
    while blocks and _steps(blocks[1:]) + _steps(recent) >= MOST_STEPS:
        dropped.append(blocks.pop(0))
    old = _newest_of_unused_sizes(dropped, used={_size(o) for block in (*blocks, *recent) for o in block})
    if old and blocks:
        # In the oldest remaining block, not before it, so that merging again finds the same blocks.
        oldest = blocks[0]
        blocks[0] = (*(replace(o, ended_s=oldest[-1].ended_s) for o in old), *oldest)
    elif old:
        blocks = [tuple(replace(o, ended_s=dropped[-1][-1].ended_s) for o in old)]
    return tuple(o for block in (*blocks, *recent) for o in block)


def _newest_of_unused_sizes(
    dropped: Sequence[Sequence[Observation]], *, used: Collection[tuple[int, int]]
) -> list[Observation]:
    """Return the newest observation of each size that no later observation has, oldest first."""
    newest: dict[tuple[int, int], Observation] = {}
    for block in reversed(dropped):
        for observation in reversed(block):
            if _size(observation) not in used:
                newest.setdefault(_size(observation), observation)
    return list(newest.values())[:MOST_OLD_SIZES][::-1]


def _steps(scrapes: Iterable[Sequence[Observation]]) -> int:
    return sum(o.steps for scrape in scrapes for o in scrape)


def _alike(block: Sequence[Sequence[Observation]], scrape: Sequence[Observation]) -> bool:
    """Return whether each shape of the scrape took about as long as in the block."""
    for new in scrape:
        olds = [o for old in block for o in old if _shape(o) == _shape(new) and o.compute is not None]
        if not olds or new.compute is None:
            continue
        seconds = [o.compute.mean for o in (*olds, new) if o.compute is not None]
        if max(seconds) > _SAME_SPEED_RATIO * min(seconds):
            return False
    return True


def _size(observation: Observation) -> tuple[int, int]:
    return (observation.share_samples, observation.micro_batches)


def _shape(observation: Observation) -> tuple[int, int, bool]:
    return (*_size(observation), observation.warm_up)


def _merged(block: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    """Return one observation for each shape of the block, all with the time of its last scrape."""
    if len(block) == 1 and (len(block[0]) == 1 or len({_shape(o) for o in block[0]}) == len(block[0])):
        return tuple(block[0])  # merged before: most blocks, at every scrape
    by_shape: dict[tuple[int, int, bool], Observation] = {}
    for scrape in block:
        for new in scrape:
            old = by_shape.get(_shape(new))
            by_shape[_shape(new)] = new if old is None else _both(old, new)
    ended_s = block[-1][-1].ended_s
    return tuple(replace(o, ended_s=ended_s) for o in by_shape.values())


def _both(a: Observation, b: Observation) -> Observation:
    def pooled(of_a: MeanVariance | None, of_b: MeanVariance | None) -> MeanVariance | None:
        return _pooled(of_a, a.steps, of_b, b.steps)

    return replace(
        b,
        steps=a.steps + b.steps,
        load=pooled(a.load, b.load),
        forward=pooled(a.forward, b.forward),
        backward=pooled(a.backward, b.backward),
        sync=pooled(a.sync, b.sync),
        update=pooled(a.update, b.update),
        compute=pooled(a.compute, b.compute),
        step=pooled(a.step, b.step),
        first_bucket_fraction=pooled(a.first_bucket_fraction, b.first_bucket_fraction),
        **_exchange(a, b),
    )


def _exchange(a: Observation, b: Observation) -> dict[str, Any]:
    """Return the fields of the exchange over both; that among the newer members alone where they differ."""
    if a.generation != b.generation:
        one = b if b.generation is not None and b.bucket_steps else a if a.generation is not None else b
        return {name: getattr(one, name) for name in ("generation", "bucket_steps", "overlapped_s", "last_bucket_s")}
    return {
        "generation": b.generation,
        "bucket_steps": a.bucket_steps + b.bucket_steps,
        "overlapped_s": _mean(a.overlapped_s, a.bucket_steps, b.overlapped_s, b.bucket_steps),
        "last_bucket_s": _mean(a.last_bucket_s, a.bucket_steps, b.last_bucket_s, b.bucket_steps),
    }


def _pooled(a: MeanVariance | None, steps_a: int, b: MeanVariance | None, steps_b: int) -> MeanVariance | None:
    """Return mean and variance over the steps of both, ``None`` where one of them is unknown."""
    if a is None or b is None:
        return None
    steps = steps_a + steps_b
    mean = (steps_a * a.mean + steps_b * b.mean) / steps
    within = (steps_a - 1) * (a.variance or 0.0) + (steps_b - 1) * (b.variance or 0.0)
    between = steps_a * steps_b / steps * (a.mean - b.mean) ** 2
    return MeanVariance(mean=mean, variance=(within + between) / (steps - 1))


def _mean(a: float | None, steps_a: int, b: float | None, steps_b: int) -> float | None:
    known = [(value, steps) for value, steps in ((a, steps_a), (b, steps_b)) if value is not None and steps > 0]
    total = sum(steps for _, steps in known)
    return sum(value * steps for value, steps in known) / total if total else None
