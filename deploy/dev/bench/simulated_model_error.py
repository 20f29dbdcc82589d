"""Simulated: how far the two-term model is from a bucket-by-bucket step. Prints Markdown; docs/simulation.md quotes it.

Random clusters, random splits; no noise. The model is never slower than the truth, so the error is one-sided: by how much
it promises too short a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from heterotrain_simulator.buckets import MIB, Buckets, Network, alone_s, cut, two_terms
from heterotrain_simulator.workloads import WORKLOADS
from numpy.typing import NDArray

CASES = 20_000
Floats = NDArray[np.float64]


class Case(NamedTuple):
    """One cluster: seconds before and in backward for each rank, buckets and what each of them takes."""

    before: Floats
    backward: Floats
    buckets: Buckets
    transfer: Floats


def equal(chance: np.random.Generator) -> Case:
    """Equal buckets that fill at even distances."""
    count = int(chance.integers(2, 20))
    buckets = Buckets(size_bytes_K=np.full(count, 1.0), ready_K=np.linspace(chance.uniform(), 1, count))
    return Case(*_ranks(chance), buckets, np.full(count, chance.uniform(0, 1) / count))


def ddp(chance: np.random.Generator) -> Case:
    """A gradient as DDP cuts it (1 MiB first, then 25 MiB) on a network of 1 to 100 Gb/s."""
    workload = list(WORKLOADS.values())[int(chance.integers(len(WORKLOADS)))]
    buckets = cut(workload.gradient_bytes, gamma=float(chance.uniform(0.05, 0.3)), bucket_bytes=25 * MIB)
    network = Network(bytes_per_s=float(10 ** chance.uniform(8, 10)), latency_s=2e-5)
    before, backward = _ranks(chance)
    return Case(before, backward, buckets, network.transfer_s(buckets.size_bytes_K, len(before)))


def anything(chance: np.random.Generator) -> Case:
    """Buckets of any size that fill whenever they like."""
    count = int(chance.integers(2, 20))
    ready = np.sort(chance.uniform(0, 1, count))
    ready[-1] = 1.0
    buckets = Buckets(size_bytes_K=np.full(count, 1.0), ready_K=ready)
    return Case(*_ranks(chance), buckets, chance.uniform(0, 2 / count, count))


def _ranks(chance: np.random.Generator) -> tuple[Floats, Floats]:
    count = int(chance.integers(2, 17))
    return chance.uniform(0.1, 1, count), chance.uniform(0.2, 2, count)


def error(case: Case) -> float:
    """Return by which part of the true step the two-term model is too short."""
    truth = float(alone_s(case.before, case.backward, case.buckets.ready_K, case.transfer).max())
    exchange = two_terms(case.buckets, case.transfer)
    compute = case.before + case.backward
    started = case.before + exchange.gamma * case.backward
    model = max(float(compute.max()), float(started.max()) + exchange.overlapped_s) + exchange.last_bucket_s
    return 1 - model / truth


def main() -> None:
    """Print one row for each kind of buckets."""
    print(f"Simulated, {CASES} random clusters each.\n")
    print("| buckets | mean | 95 of 100 | worst |")
    print("| --- | ---: | ---: | ---: |")
    kinds: dict[str, Callable[[np.random.Generator], Case]] = {
        "equal, filled at even distances": equal,
        "as DDP cuts the five workloads, 1 to 100 Gb/s": ddp,
        "any size, filled at any time": anything,
    }
    for name, draw in kinds.items():
        chance = np.random.default_rng(1)
        errors = np.array([error(draw(chance)) for _ in range(CASES)])
        print(f"| {name} | {max(0.0, errors.mean()):.1%} | {np.quantile(errors, 0.95):.1%} | {errors.max():.1%} |")


if __name__ == "__main__":
    main()
