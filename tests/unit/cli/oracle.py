"""Brute force for the forecast: reads a profile document by itself and shares nothing with the code under test.

Dynamic programming over (members so far, samples so far) for the least greatest step time, every share of every member
tried; ``enumerate_all`` tries every whole division instead, and the two have to agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

Member = dict[str, Any]
INFINITE = math.inf


def singles(document: dict[str, Any]) -> list[Member]:
    """Return one entry for each single member."""
    return [member for member in document["members"] for _ in range(member.get("count", 1))]


def micro_batches(member: Member, samples: int) -> list[int]:
    """Return the sizes of the micro-batches of a share, nearly equal, the smallest last."""
    if samples == 0:
        return []
    count = math.ceil(samples / member.get("maxMicroBatchSamples", samples))
    sizes = [samples // count] * count
    for i in range(samples - sum(sizes)):
        sizes[i] += 1
    return sizes


def by_table(points: list[list[float]], samples: int) -> float:
    """Return seconds by linear interpolation, flat below the first point."""
    points = sorted(points)
    if samples <= points[0][0]:
        return points[0][1]
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if n0 <= samples <= n1:
            return t0 + (t1 - t0) * (samples - n0) / (n1 - n0)
    raise AssertionError("beyond the table")


def own_s(member: Member, samples: int) -> float:
    """Return a member's own compute seconds."""
    total = 0.0
    for size in micro_batches(member, samples):
        if "measured" in member:
            total += by_table(member["measured"], size)
        else:
            total += member.get("perSampleSeconds", 0) * size + member.get("fixedSeconds", 0)
            total += member.get("backwardPerSampleSeconds", 0) * size + member.get("backwardFixedSeconds", 0)
    return total


def terms(document: dict[str, Any], member: Member, samples: int) -> tuple[float, float]:
    """Return the compute term and the communication term of the two-term step time for one member."""
    exchange = document.get("communication", {})
    overlapped, last = exchange.get("overlappedSeconds", 0), exchange.get("lastBucketSeconds", 0)
    gamma = exchange.get("gamma", 0)
    backward = 0.0
    if "measured" not in member and samples > 0:
        size = micro_batches(member, samples)[-1]
        backward = member.get("backwardPerSampleSeconds", 0) * size + member.get("backwardFixedSeconds", 0)
    own = own_s(member, samples)
    return own + last, own - backward + gamma * backward + overlapped + last


def step_s(document: dict[str, Any], member: Member, samples: int) -> float:
    """Return the end of the step for this member alone."""
    return max(terms(document, member, samples))


def allowed(member: Member, batch: int) -> Iterator[int]:
    """Yield every share that a member may have."""
    most = min(member.get("maxSamples", batch), batch)
    if "measured" in member:
        most = min(most, max(n for n, _ in member["measured"]))
    for samples in range(member.get("minSamples", 1), most + 1):
        if samples % member.get("granularity", 1) == 0:
            yield samples


def least_step_s(document: dict[str, Any], batch: int) -> float:
    """Return the least step time over all divisions, infinite when there is none."""
    best = [0.0] + [INFINITE] * batch
    for member in singles(document):
        options = [(share, step_s(document, member, share)) for share in allowed(member, batch)]
        following = [INFINITE] * (batch + 1)
        for done, so_far in enumerate(best):
            if so_far == INFINITE:
                continue
            for share, time_s in options:
                if done + share <= batch:
                    following[done + share] = min(following[done + share], max(so_far, time_s))
        best = following
    return best[batch]


def enumerate_all(document: dict[str, Any], batch: int) -> float:
    """Return the same by trying every division; for very small cases only."""
    members = singles(document)
    choices = [list(allowed(member, batch)) for member in members]
    return min(
        (
            max(step_s(document, m, n) for m, n in zip(members, shares, strict=True))
            for shares in itertools.product(*choices)
            if sum(shares) == batch
        ),
        default=INFINITE,
    )
