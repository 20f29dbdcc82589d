"""Shares, groupings and layers as published planners choose them, for problems without pipelines of stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from heterotrain_simulator.zones import Counts, ZoneCosts


def least_variance(times: Sequence[float], replicas: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the micro-batches of each template by the objective of Oobleck's code of 2023.

    It minimises ``Σ (T_i n_i − mean)²`` over templates, not weighted by their number of pipelines, with n_i ≥ 1 and
    ``Σ x_i n_i`` the whole batch. Solved here by trying all.

    Args:
        times: seconds T_i of a micro-batch.
        replicas: pipelines x_i of each template.
        total: micro-batches of the batch.
    """

    def spread(each: tuple[int, ...]) -> float:
        ends = [time * count for time, count in zip(times, each, strict=True)]
        mean = sum(ends) / len(ends)
        return sum((end - mean) ** 2 for end in ends)

    return min(divisions(replicas, total), key=lambda each: (spread(each), each))


def least_maximum(times: Sequence[float], replicas: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the micro-batches by the objective of its code of 2024: the least ``max T_i n_i``, n_i ≥ 0."""
    return min(
        divisions(replicas, total, least=0),
        key=lambda each: (max(time * count for time, count in zip(times, each, strict=True)), each),
    )


def divisions(replicas: Sequence[int], total: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield all micro-batches of each template that make up the batch."""
    if len(replicas) == 1:
        if total % replicas[0] == 0 and total // replicas[0] >= least:
            yield (total // replicas[0],)
        return
    for count in range(least, total // replicas[0] + 1):
        for rest in divisions(replicas[1:], total - count * replicas[0], least):
            yield (count, *rest)


def random_grouping_s(
    costs: ZoneCosts, counts: Sequence[int], stages: int, draws: int, seed: int
) -> tuple[float, float]:
    """Return least and mean total of random groupings, which DT-FM compares its search with.

    The stages of each draw are in the best of some orders: each stage follows the nearest one that is left.
    """
    chance = np.random.default_rng(seed)
    homes = np.repeat(np.arange(len(counts)), counts)
    size = len(homes) // stages
    totals = []
    for _ in range(draws):
        rows = chance.permutation(homes).reshape(stages, size)
        left: list[Counts] = [tuple(np.bincount(row, minlength=len(counts)).tolist()) for row in rows]
        path = [left.pop()]
        while left:
            path.append(left.pop(min(range(len(left)), key=lambda index: costs.edge_s(path[-1], left[index]))))
        totals.append(costs.total_s(path))
    return min(totals), sum(totals) / len(totals)


def learned_layers(seconds: Sequence[float], layers: int, *, steps: int, draws: int, seed: int) -> tuple[int, ...]:
    """Return the layers of each type that a learned policy finds for the shortest slowest stage (HeterPS).

    HeterPS trains an LSTM by REINFORCE to name a type for each layer. Here the policy is a table of layer by type, and
    a type's layers form one stage, because times do not depend on the order. The best draw of all counts.

    Args:
        seconds: of one layer on all devices of a type together.
        layers: equal ones.
        steps: of the policy gradient.
        draws: placements tried in each step.
        seed: of the draws.
    """
    chance = np.random.default_rng(seed)
    score = np.zeros((layers, len(seconds)))
    per_layer = np.array(seconds)
    best, best_s = np.zeros(len(seconds), dtype=np.int64), np.inf
    for _ in range(steps):
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        chances = weight / weight.sum(axis=1, keepdims=True)
        rolls = chance.random((draws, layers, 1))
        types = np.minimum((rolls > chances.cumsum(axis=1)).sum(axis=2), len(seconds) - 1)
        counts = np.array([np.bincount(row, minlength=len(seconds)) for row in types])
        slowest = (counts * per_layer).max(axis=1)
        if slowest.min() < best_s:
            best, best_s = counts[slowest.argmin()], float(slowest.min())
        advantage = (slowest.mean() - slowest) / (slowest.std() + 1e-12)
        for row, gain in zip(types, advantage, strict=True):
            chosen = np.zeros_like(score)
            chosen[np.arange(layers), row] = 1.0
            score += gain / draws * (chosen - chances)
    return tuple(best.tolist())


def proportional_to_one(times: Sequence[Sequence[float]], total: int) -> tuple[int, ...]:
    """Return shares in proportion to the speed at one sample, by largest remainder, without a limit (Metis)."""
    weights = [1.0 / curve[0] for curve in times]
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in itertools.islice(itertools.cycle(order), total - sum(shares)):
        shares[index] += 1
    return tuple(shares)
