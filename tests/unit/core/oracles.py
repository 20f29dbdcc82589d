"""Slow and simple solutions to compare the fast ones with. Nothing here shares code with the solver."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import CurveTime, SplitMember, TableTime


def table_at(points: Sequence[tuple[float, float]], samples: float) -> float:
    """Return a table's seconds: linear between points, flat below the first; beyond the last there is none."""
    if samples <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if samples <= x1:
            return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)
    return math.inf


def micro_batch_sizes(share: int, micro_cap: int | None) -> list[int]:
    """Return the sizes of a share's micro-batches: as few and as equal as possible, larger ones first."""
    if share == 0:
        return []
    count = 1 if micro_cap is None else math.ceil(share / micro_cap)
    return [share // count + (j < share % count) for j in range(count)]


def member_step_s(member: SplitMember, share: int, communication: CommunicationTime) -> float:
    """Return when a step ends that only this member holds up, by playing it through phase by phase."""
    sizes = micro_batch_sizes(share, member.micro_cap_samples)
    compute = member.compute
    now = ready = 0.0
    if isinstance(compute, TableTime):
        if share > compute.points[-1][0]:
            return math.inf
        now = ready = sum(table_at(compute.points, size) for size in sizes)
    elif isinstance(compute, CurveTime):
        return curve_step_s(member, compute, share, communication)
    else:
        now = ready = compute.update_s
        for size in sizes:
            now += compute.per_sample_s * size + compute.fixed_s
            backward = compute.backward_per_sample_s * size + compute.backward_fixed_s
            ready = now + communication.gamma * backward
            now += backward
    return max(now, ready + communication.overlapped_s) + communication.last_bucket_s


def curve_step_s(member: SplitMember, curve: CurveTime, share: int, communication: CommunicationTime) -> float:
    """Return the same for a curve: no allowed share takes less time than a smaller one, whatever its micro-batches."""
    own = worst = 0.0
    for n in allowed_shares(member, share):
        sizes = micro_batch_sizes(n, member.micro_cap_samples)
        own = max(own, sum(table_at(curve.points, size) for size in sizes))
        hidden = curve.backward_part * table_at(curve.points, sizes[-1]) * (1 - communication.gamma) if sizes else 0.0
        worst = max(worst, own + max(0.0, communication.overlapped_s - hidden))
    return curve.update_s + worst + communication.last_bucket_s


def step_s(members: Sequence[SplitMember], shares: Sequence[int], communication: CommunicationTime) -> float:
    """Return the step time of given shares."""
    return max(member_step_s(m, n, communication) for m, n in zip(members, shares, strict=True))


def allowed_shares(member: SplitMember, total: int) -> list[int]:
    """Return every share that the member may be given."""
    return [
        n
        for n in range(0, total + 1, member.granularity_samples)
        if n >= member.floor_samples
        and (member.cap_samples is None or n <= member.cap_samples)
        and (not isinstance(member.compute, TableTime) or n <= member.compute.points[-1][0])
    ]


def least_step_s(total: int, members: Sequence[SplitMember], communication: CommunicationTime) -> float | None:
    """Return the least step time over all integer divisions, by brute force; ``None`` when none fits."""
    best = {0: 0.0}
    for member in members:
        times = {n: member_step_s(member, n, communication) for n in allowed_shares(member, total)}
        following: dict[int, float] = {}
        for taken, slowest in best.items():
            for n, seconds in times.items():
                if taken + n <= total:
                    worst = max(slowest, seconds)
                    if worst < following.get(taken + n, math.inf):
                        following[taken + n] = worst
        best = following
    return best.get(total)


def bucket_step_s(  # an oracle takes what it needs
    compute: Sequence[ComputeTime],
    shares: Sequence[int],
    transfers_s: Sequence[float],
    ready_at: Sequence[float],
    start_s: float = 0.0,
) -> float:
    """Return a step's seconds, bucket by bucket: each bucket waits for all members and for the bucket before it.

    Args:
        compute: time models.
        shares: samples.
        transfers_s: seconds that each bucket's exchange takes.
        ready_at: fraction of backward after which each bucket is ready, the last one 1.
        start_s: seconds that have passed before.
    """
    done = start_s
    for transfer, fraction in zip(transfers_s, ready_at, strict=True):
        everybody = max(
            c.update_s + c.per_sample_s * n + c.fixed_s + fraction * (c.backward_per_sample_s * n + c.backward_fixed_s)
            for c, n in zip(compute, shares, strict=True)
        )
        done = max(done, everybody) + transfer
    return done


def a_compute(rng: random.Random) -> ComputeTime:
    """Return a random time model in which any part, but not all, may be zero."""

    def part(scale: float) -> float:
        return rng.choice([0.0, scale * rng.random(), scale * rng.random()])

    while True:
        found = ComputeTime(
            per_sample_s=part(0.3),
            fixed_s=part(2),
            backward_per_sample_s=part(0.4),
            backward_fixed_s=part(1),
            update_s=part(0.2),
        )
        if found.per_sample_s + found.fixed_s + found.backward_per_sample_s + found.backward_fixed_s > 0:
            return found


def a_table(rng: random.Random) -> TableTime:
    """Return a random table, half of the time one that falls somewhere."""
    samples = sorted(rng.sample(range(1, 30), rng.randint(1, 5)))
    seconds = [0.01 + 3 * rng.random() for _ in samples]
    if rng.random() < 0.5:
        seconds.sort()
    return TableTime(points=tuple(zip(samples, seconds, strict=True)))


def a_curve(rng: random.Random) -> CurveTime:
    """Return a random curve, up to sizes that no share here exceeds."""
    samples = sorted(rng.sample(range(1, 30), rng.randint(1, 5)))
    seconds = sorted(0.01 + 3 * rng.random() for _ in samples)
    return CurveTime(
        points=(*zip([n + rng.choice([0.0, 0.5]) for n in samples], seconds, strict=True), (99.0, seconds[-1] + 5)),
        backward_part=rng.choice([0.0, 1.0, rng.random()]),
        update_s=rng.choice([0.0, 0.2 * rng.random()]),
    )


def a_communication(rng: random.Random) -> CommunicationTime:
    """Return a random exchange, a third of the time none."""
    if rng.random() < 0.3:
        return CommunicationTime()
    return CommunicationTime(
        overlapped_s=rng.choice([0.0, 3 * rng.random()]),
        last_bucket_s=rng.random(),
        gamma=rng.choice([0.0, 1.0, rng.random()]),
    )


def a_problem(rng: random.Random, *, curves: float = 0.0) -> tuple[int, list[SplitMember], CommunicationTime]:
    """Return a small random problem with every feature: floors, caps, granularities, micro-batches, tables.

    A part ``curves`` of the members have time curves.
    """
    granular = rng.choice(["one", "one", "same", "mixed"])
    same = rng.randint(1, 4)
    members = [
        SplitMember(
            compute=_a_time(rng, curves),
            floor_samples=rng.choice([0, 1, 1, rng.randint(0, 5)]),
            cap_samples=rng.choice([None, rng.randint(1, 30)]),
            micro_cap_samples=rng.choice([None, rng.randint(1, 8)]),
            granularity_samples={"one": 1, "same": same, "mixed": rng.randint(1, 4)}[granular],
        )
        for _ in range(rng.randint(1, 5))
    ]
    return rng.randint(1, 40), members, a_communication(rng)


def _a_time(rng: random.Random, curves: float) -> ComputeTime | TableTime | CurveTime:
    if curves and rng.random() < curves:
        return a_curve(rng)
    return a_table(rng) if rng.random() < 0.3 else a_compute(rng)
