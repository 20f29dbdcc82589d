"""The exchange at numbers of members that were not seen, against rings that are simulated round by round."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from heterotrain_core.contract.keys import MOST_SIZES
from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen, MeasuredExchange, exchange_s, with_seen


class Network(NamedTuple):
    """Links inside a host and between hosts, each with a latency in seconds and a bandwidth in bytes per second."""

    inside: tuple[float, float]
    between: tuple[float, float]
    ranks_per_host: int
    buckets: tuple[float, ...]


def simulated_s(network: Network, members: int) -> float:
    """Return the seconds of a ring all-reduce, chunk by chunk: no rank sends what it has not received."""
    host = np.arange(members) // network.ranks_per_host
    links = [network.inside if same else network.between for same in (host == np.roll(host, 1)).tolist()]
    latency_s, bandwidth = np.array(links).T
    total_s = 0.0
    for size, count in Counter(network.buckets).items():
        ready_s = np.zeros(members)
        for _ in range(2 * (members - 1)):
            # A link carries one chunk after the other, so it is free when its receiver has the chunk before.
            ready_s = np.maximum(np.roll(ready_s, 1), ready_s) + latency_s + size / members / bandwidth
        total_s += count * float(ready_s.max())
    return total_s


def drawn(rng: random.Random) -> Network:
    """Return a network between a fast one with short messages and a slow one with long messages."""
    size = rng.uniform(1e7, 5e8)
    slow = (10 ** rng.uniform(-4.5, -2.7), 10 ** rng.uniform(8.1, 9.5))
    fast = (slow[0] / rng.uniform(2, 20), slow[1] * rng.uniform(2, 20))
    full, rest = divmod(size, 25e6)
    return Network(fast, slow, rng.choice([1, 2, 4, 8]), (*[25e6] * int(full), rest))


def measured(network: Network, members: int, rng: random.Random) -> ExchangeSeen:
    """Return a measurement with 2 % of noise."""
    seconds = simulated_s(network, members) * rng.gauss(1.0, 0.02)
    return ExchangeSeen(members=members, across=members > network.ranks_per_host, seconds=seconds, steps=100)


def predicted_s(seen: tuple[ExchangeSeen, ...], members: int, *, across: bool) -> float:
    return float(exchange_s(seen, np.array([members]), np.array([across]))[0])


RATIO_R = np.concatenate([[0.0], np.geomspace(1e-6, 1e3, 900)])


def pollux_s(points: list[tuple[int, float]], members: int) -> float:
    """Return the network time of Pollux (OSDI 2021): alpha + beta (K - 2), fitted as AdaptDL fits it.

    That is the root mean square of logarithmic errors with ``0.01 (beta / alpha)²`` added, and 0 where nothing was
    seen. Here it gets the measured exchange, which AdaptDL has to find in whole steps. For a given beta / alpha, the
    best alpha is known, so a search over this ratio is enough.
    """
    if not points:
        return 0.0
    size_K, seconds_K = np.array(points).T
    ratio_R = RATIO_R if (size_K > 2).any() else RATIO_R[:1]
    left_RK = np.log(seconds_K) - np.log(1 + ratio_R[:, None] * (size_K - 2))
    alpha_R = left_RK.mean(axis=1)
    best = int((np.sqrt(((left_RK - alpha_R[:, None]) ** 2).mean(axis=1)) + 0.01 * ratio_R**2).argmin())
    return float(np.exp(alpha_R[best]) * (1 + ratio_R[best] * (members - 2)))


def errors(sizes: tuple[int, ...], *, networks: int) -> tuple[list[float], list[float], list[float]]:
    """Return relative errors at sizes not seen: (n - 1) / n of the newest size, all sizes, and Pollux."""
    rng = random.Random(3)
    before, after, pollux = [], [], []
    for _ in range(networks):
        network = drawn(rng)
        seen: tuple[ExchangeSeen, ...] = ()
        for members in sizes:
            seen = with_seen(seen, measured(network, members, rng))
        for members in {2, 3, 6, 12, 24, 32, 64} - set(sizes):
            truth = simulated_s(network, members)
            newest = seen[-1]
            plain = newest.seconds * (members - 1) / members / ((newest.members - 1) / newest.members)
            found = predicted_s(seen, members, across=members > network.ranks_per_host)
            across = members > network.ranks_per_host
            other = pollux_s([(each.members, each.seconds) for each in seen if each.across == across], members)
            before.append(abs(plain / truth - 1))
            after.append(abs(found / truth - 1))
            pollux.append(abs(other / truth - 1))
    return before, after, pollux


@pytest.mark.parametrize(
    ("sizes", "most_median", "most_95"),
    [((4, 16), 0.06, 0.6), ((2, 4, 8, 16), 0.04, 0.3)],
)
def test_sizes_not_seen_are_predicted_from_several_sizes(
    sizes: tuple[int, ...], most_median: float, most_95: float
) -> None:
    before, after, pollux = (np.array(each) for each in errors(sizes, networks=40))
    assert np.quantile(after, 0.5) <= most_median < np.quantile(before, 0.5)
    assert np.quantile(after, 0.95) <= most_95 < np.quantile(before, 0.95)
    for part in (0.5, 0.9, 0.95):
        assert np.quantile(after, part) < np.quantile(pollux, part)


def test_one_size_grows_like_the_data_that_a_ring_moves() -> None:
    before, after, _ = errors((4,), networks=10)
    assert after == pytest.approx(before)
    assert predicted_s((ExchangeSeen(members=4, across=True, seconds=1.0, steps=9),), 1, across=False) == 0.0


def test_noise_alone_is_no_latency() -> None:
    """Neighbouring sizes with 2 % of noise: without shrinkage, 64 members would be up to several times too slow."""
    rng = random.Random(5)
    for _ in range(100):
        seen = tuple(
            ExchangeSeen(members=n, across=True, seconds=2 * (n - 1) / n * rng.gauss(1.0, 0.02), steps=100)
            for n in (7, 8)
        )
        assert predicted_s(seen, 64, across=True) == pytest.approx(2 * 63 / 64, rel=0.6)


def test_predictions_never_fall_with_members_and_are_exact_at_the_newest_size() -> None:
    rng = random.Random(7)
    for _ in range(200):
        seen = tuple(
            ExchangeSeen(
                members=n, across=rng.random() < 0.5, seconds=10 ** rng.uniform(-9, 6), steps=rng.randint(1, 99)
            )
            for n in rng.sample(range(2, 40), rng.randint(1, 5))
        )
        for across in (False, True):
            found_O = exchange_s(seen, np.arange(1, 200), np.full(199, across))
            assert np.isfinite(found_O).all()
            assert (np.diff(found_O) >= -1e-12 * found_O[1:]).all()
        newest = seen[-1]
        assert predicted_s(seen, newest.members, across=newest.across) == pytest.approx(newest.seconds)


def test_measurements_are_bounded_and_stay_while_nothing_moves() -> None:
    def at(members: int, seconds: float, steps: int = 50) -> ExchangeSeen:
        return ExchangeSeen(members=members, across=True, seconds=seconds, steps=steps)

    seen = with_seen((), at(4, 1.0))
    assert with_seen(seen, at(4, 1.02, 60)) == seen, "a change would value the job again"
    assert with_seen(seen, at(4, 1.04, 60)) == (at(4, 1.04, 60),)
    assert with_seen(seen, at(4, 1.02, 100)) == (at(4, 1.02, 100),)
    for bad in (at(1, 1.0), at(4, 0.0), at(4, float("nan")), at(4, float("inf")), at(4, 1e7), at(4, 1.0, 0)):
        assert with_seen(seen, bad) == seen
    for members in range(2, 100):
        seen = with_seen(seen, at(members, 1.0))
    assert [each.members for each in seen] == list(range(100 - MOST_SIZES, 100))
    back = with_seen(seen, at(90, 1.0))
    assert (len(back), back[-1].members) == (MOST_SIZES, 90), "the present size comes last"


MEASURED = CommunicationTime(overlapped_s=0.06, last_bucket_s=0.02, gamma=0.25)


def test_the_exchange_of_another_size_keeps_its_parts_and_a_single_member_has_none() -> None:
    ring = MeasuredExchange(communication=MEASURED, members=4)
    for members in (2, 4, 32):
        found, data = ring.among(members, across=True), (members - 1) / members / (3 / 4)
        assert (found.overlapped_s, found.last_bucket_s) == pytest.approx((0.06 * data, 0.02 * data))
        assert found.gamma == MEASURED.gamma
    assert ring.among(1, across=False) == CommunicationTime()
    unknown = MeasuredExchange(communication=MEASURED)
    assert unknown.among(9, across=True) == MEASURED, "nothing follows from an unknown number of members"


def test_the_sizes_seen_decide_about_other_sizes() -> None:
    """Latency alone: sixteen members take five times as long as four, where the data hardly grow."""
    seen = tuple(ExchangeSeen(members=n, across=True, seconds=0.08 / 3 * (n - 1), steps=100) for n in (2, 8, 4))
    known = MeasuredExchange(communication=MEASURED, members=4, seen=seen)
    assert known.among(4, across=True).overlapped_s == pytest.approx(0.06)
    assert known.among(16, across=True).overlapped_s == pytest.approx(0.06 * 5, rel=0.05)
    grown = known.measured_among(5, across=True, steps=10)
    assert grown.seen[-1] == ExchangeSeen(members=5, across=True, seconds=0.08, steps=10)
