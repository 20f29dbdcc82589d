"""The bucket-level step: exact against a plain event simulation, and the two-term model's error against it."""

from __future__ import annotations

import numpy as np
import pytest
from heterotrain_simulator.buckets import MIB, Buckets, Network, alone_s, cut, finish_s, two_terms


def event_by_event(before: list[float], backward: list[float], ready: list[float], transfer: list[float]) -> float:
    """Return the step's end from a queue of (time, rank, bucket) events, one link that carries one bucket at a time."""
    events = sorted(
        (a + p * r, rank, j)
        for rank, (a, p) in enumerate(zip(before, backward, strict=True))
        for j, r in enumerate(ready)
    )
    have = [0] * len(ready)
    free_at, following = 0.0, 0
    for time, _, j in events:
        have[j] += 1
        while following < len(ready) and have[following] == len(before):
            free_at = max(free_at, time) + transfer[following]
            following += 1
    assert following == len(ready)
    return free_at


def random_case(
    generator: np.random.Generator, *, equal: bool
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return a cluster of a few ranks and a few buckets."""
    ranks, buckets = int(generator.integers(1, 6)), int(generator.integers(2, 9))
    before = generator.uniform(0, 1, ranks).tolist()
    backward = generator.uniform(0, 2, ranks).tolist()
    gamma = float(generator.uniform(0, 1))
    if equal:
        return before, backward, np.linspace(gamma, 1, buckets).tolist(), [float(generator.uniform(0, 0.4))] * buckets
    ready = np.sort(generator.uniform(gamma, 1, buckets))
    ready[0], ready[-1] = gamma, 1.0
    return before, backward, ready.tolist(), generator.uniform(0, 0.4, buckets).tolist()


def test_the_vectorised_step_is_the_event_simulation() -> None:
    """Unequal buckets, uneven readiness: the same end, to rounding; and separable by rank."""
    generator = np.random.default_rng(1)
    for _ in range(500):
        before, backward, ready, transfer = random_case(generator, equal=False)
        a, p, r, t = map(np.array, (before, backward, ready, transfer))
        expected = event_by_event(before, backward, ready, transfer)
        assert finish_s(a[None], p[None], r, t)[0] == pytest.approx(expected, rel=1e-12)
        assert alone_s(a, p, r, t).max() == pytest.approx(expected, rel=1e-12)


def two_term_s(before: list[float], backward: list[float], ready: list[float], transfer: list[float]) -> float:
    """Return the two-term step time."""
    exchange = two_terms(Buckets(size_bytes_K=np.array(transfer), ready_K=np.array(ready)), np.array(transfer))
    compute = max(a + p for a, p in zip(before, backward, strict=True))
    started = max(a + exchange.gamma * p for a, p in zip(before, backward, strict=True))
    return max(compute, started + exchange.overlapped_s) + exchange.last_bucket_s


def test_two_terms_are_exact_for_equal_buckets() -> None:
    """3,000 random clusters with equal buckets and linear readiness: no difference beyond rounding."""
    generator = np.random.default_rng(2)
    for _ in range(3000):
        case = random_case(generator, equal=True)
        assert two_term_s(*case) == pytest.approx(event_by_event(*case), rel=1e-12)


def test_two_terms_never_promise_too_little_speed_and_err_within_a_bound() -> None:
    """Unequal buckets: the model is a lower bound, off by 0.8 % in the mean and less than a quarter at worst."""
    generator = np.random.default_rng(3)
    errors = []
    for _ in range(3000):
        case = random_case(generator, equal=False)
        truth = event_by_event(*case)
        errors.append(1 - two_term_s(*case) / truth)
    assert min(errors) > -1e-12
    assert np.mean(errors) < 0.02
    assert max(errors) < 0.25


def test_a_gradient_is_cut_as_ddp_cuts_it() -> None:
    """A small first bucket, full ones, the rest; sizes add up."""
    buckets = cut(60 * MIB, gamma=0.2, bucket_bytes=25 * MIB)
    assert (buckets.size_bytes_K / MIB).tolist() == [1, 25, 25, 9]
    assert buckets.ready_K == pytest.approx([0.2, 0.2 + 0.8 / 3, 0.2 + 1.6 / 3, 1.0])
    assert cut(1000.0, gamma=0.2).ready_K.tolist() == [1.0]


def test_a_ring_s_time() -> None:
    """2 (n - 1) / n of the bytes, plus the messages' latencies; one rank alone needs none."""
    network = Network(bytes_per_s=1e9, latency_s=1e-5)
    assert network.transfer_s(np.array([1e9]), 4)[0] == pytest.approx(1.5 + 6e-5)
    assert network.transfer_s(np.array([1e9]), 1)[0] == 0
