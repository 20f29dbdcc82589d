"""The global batch with the highest goodput: throughput times statistical efficiency.

``goodput(B) = B / T(B) * (phi + B_0) / (phi + B)``: samples per second, each weighted by its contribution relative to
one in a batch of ``B_0`` (Pollux, OSDI'21). ``T`` is the split's optimum for these members, so it includes memory
limits and unequal speeds. Any member's long step delays all members, so ``T`` also has the mean wait for long steps: a
larger batch has fewer of them.

Legend: ``B`` batches, ``W`` members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract.hiccups import NO_HICCUPS, Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Infeasible, Split, balance_many, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_core.split.step_time import Timing
from numpy.typing import NDArray

from heterotrain_planner.perf.expected_maximum import expected_maximum_of_hiccups

CANDIDATES = 50
"""Batches that are compared, at equal ratios."""
JUMP_CANDIDATES = 10
"""Batches just before a further micro-batch that are compared as well."""
_MOST_COUNTS = 100
"""Numbers of micro-batches of a member that are looked at for them, and _MOST_JUMPS levels of all members."""
_MOST_JUMPS = 2000
LEAST_GAIN = 0.05
"""Gain in goodput that a change of batch has to promise: the noise scale is not known more exactly."""
_ALIKE = ComputeTime(per_sample_s=1.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCandidate:
    """One global batch.

    Attributes:
        samples: the batch.
        step_s: its least step time, with the mean wait for long steps.
        samples_per_s: its throughput.
        efficiency: contribution of a sample in it, relative to one in the base batch.
        goodput_per_s: their product.
    """

    samples: int
    step_s: float
    samples_per_s: float
    efficiency: float
    goodput_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The chosen batch and all that it was compared with.

    Attributes:
        samples: the global batch.
        split: its shares.
        changed: whether it differs from the current one.
        candidates: every feasible batch that was compared, ascending.
        reason: why, in one sentence.
    """

    samples: int
    split: Split
    changed: bool
    candidates: tuple[BatchCandidate, ...]
    reason: str


def statistical_efficiency(samples: float, *, base_samples: float, noise_samples: float) -> float:
    """Return the contribution of a sample relative to one in the base batch: ``(phi + B_0) / (phi + B)``."""
    return (noise_samples + base_samples) / (noise_samples + samples)


def candidate_batches(
    *, least: int, most: int, unit: int = 1, count: int = CANDIDATES, also: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return up to ``count`` batches spaced geometrically from ``least`` to ``most``, and ``also``, ascending.

    All are multiples of ``unit`` within the limits; others in ``also`` are left out.
    """
    low, high = -(-least // unit) * unit, most // unit * unit
    if low < 1 or high < low:
        return ()
    steps = max(1, count - 1)
    spaced = (low * (high / low) ** (i / steps) for i in range(steps + 1))
    found = {min(high, max(low, round(value / unit) * unit)) for value in spaced}
    return tuple(sorted(found | {batch for batch in also if low <= batch <= high and batch % unit == 0}))


def batches_before_jumps(
    members: Sequence[SplitMember], *, communication: CommunicationTime, least: int, most: int, unit: int = 1
) -> tuple[tuple[int, float], ...]:
    """Return the batches of which one granule more needs a further micro-batch, and their least step times.

    A further micro-batch costs its fixed part, so goodput falls there. Between two such jumps of the member that sets
    the pace, the largest batch within the level before the jump is the best one of that level: it is the sum of all
    members' largest shares within it.

    Args:
        members: by rank, able to share these batches.
        communication: the exchange.
        least: least batch.
        most: largest batch.
        unit: the batches are multiples of it.
    """
    timing = Timing(members, communication, most)
    levels: list[NDArray[np.float64]] = []
    for rank in np.flatnonzero(timing.micro_W < timing.hi_W):
        full = int(timing.micro_W[rank])
        counts = np.unique(np.geomspace(1, int(timing.hi_W[rank]) // full, _MOST_COUNTS).astype(np.int64))
        granule = timing.granularity_W[rank]
        shares = np.maximum(counts * full // granule * granule, timing.lo_W[rank])
        levels.append(timing.step_at(np.full(len(shares), rank), shares))
    if not levels:
        return ()
    level_L = np.unique(np.concatenate(levels))
    level_L = level_L[:: -(-len(level_L) // _MOST_JUMPS)]
    samples_L = timing.most(level_L[:, None]).sum(axis=1)
    return tuple(
        (batch, level)
        for batch, level in zip(samples_L.tolist(), level_L.tolist(), strict=True)
        if least <= batch <= most and batch % unit == 0
    )


def choose_batch(
    members: Sequence[SplitMember],
    *,
    communication: CommunicationTime,
    base_samples: int,
    least_samples: int,
    most_samples: int,
    current_samples: int | None,
    noise_samples: float | None,
    overhead_s: float = 0.0,
    even: bool = False,
    beyond: Sequence[SplitMember] = (),
    hiccups: Hiccups = NO_HICCUPS,
) -> BatchChoice | Infeasible:
    """Return the batch with the highest goodput that fits into memory, or the current one where the gain is small.

    Stable: with the chosen batch as the current one, the same numbers choose it again. While the noise scale is
    unknown, the result is the current batch, or the base batch (clipped to the limits) if there is none.

    Args:
        members: by rank; caps and micro-batch caps decide which batches fit.
        communication: the exchange.
        base_samples: B_0, for which the user chose the learning rate.
        least_samples: least batch.
        most_samples: largest batch.
        current_samples: the batch in force; ``None`` at the start or when it is no longer possible.
        noise_samples: phi; ``None`` while unknown.
        overhead_s: seconds of a step that are neither compute nor exchange.
        even: divide each batch evenly (as far as caps allow) instead of optimally.
        beyond: the members by pessimistic models and with wider caps, for batches that ``members`` cannot take.
        hiccups: rare long steps of every member; their mean is in the members' times.
    """
    start = min(max(base_samples if current_samples is None else current_samples, least_samples), most_samples)
    unit = math.gcd(*(member.granularity_samples for member in members)) if members else 1
    batches = candidate_batches(least=least_samples, most=most_samples, unit=unit, also=(start, base_samples))
    if not batches:
        return Infeasible(reason=f"no multiple of {unit} lies between {least_samples} and {most_samples} samples")
    answers = _divided(batches, members, beyond, communication=communication, even=even)
    splits = {batch: answer for batch, answer in answers.items() if isinstance(answer, Split)}
    if not splits:
        nearest = answers[min(batches, key=lambda batch: abs(batch - start))]
        assert isinstance(nearest, Infeasible)  # noqa: S101  # no split was found
        return replace(nearest, reason=f"no batch from {least_samples} to {most_samples} fits: {nearest.reason}")
    phi = max(0.0, noise_samples) if noise_samples is not None and math.isfinite(noise_samples) else None
    if phi is not None and not even:
        jumps = batches_before_jumps(
            members, communication=communication, least=least_samples, most=most_samples, unit=unit
        )
        best = _best_before_jumps(jumps, splits, phi, overhead_s=overhead_s, hiccups=hiccups)
        found = zip(best, balance_many(best, members, communication=communication), strict=True)
        splits |= {batch: answer for batch, answer in found if isinstance(answer, Split)}
    here = start if start in splits else min(splits, key=lambda batch: (abs(batch - start), batch))
    table = _candidates(splits, base_samples, phi, overhead_s=overhead_s, hiccups=hiccups)
    samples, reason = _chosen(table, here, phi)
    return BatchChoice(
        samples=samples, split=splits[samples], changed=samples != current_samples, candidates=table, reason=reason
    )


def _divided(
    batches: Sequence[int],
    members: Sequence[SplitMember],
    beyond: Sequence[SplitMember],
    *,
    communication: CommunicationTime,
    even: bool,
) -> dict[int, Split | Infeasible]:
    """Return the division of each batch among the members or, where that fails, among those beyond their caps."""
    divide = _evenly if even else balance_many
    answers = dict(zip(batches, divide(batches, members, communication=communication), strict=True))
    if left := [batch for batch in batches if beyond and not isinstance(answers[batch], Split)]:
        wider = zip(left, divide(left, beyond, communication=communication), strict=True)
        answers |= {batch: answer for batch, answer in wider if isinstance(answer, Split)}
    return answers


def _best_before_jumps(
    jumps: Sequence[tuple[int, float]],
    splits: Mapping[int, Split],
    noise_samples: float,
    *,
    overhead_s: float,
    hiccups: Hiccups,
) -> list[int]:
    """Return the batches before jumps with the highest goodput, best first.

    Waits for long steps change little from batch to batch, so ranking needs no division of each jump's batch.
    """
    batch_B = sorted(splits)
    wait_B = _waits_s([splits[batch] for batch in batch_B], hiccups)
    worth = {
        batch: batch / step_s / (noise_samples + batch)
        for batch, level in jumps
        if (step_s := level + overhead_s + float(np.interp(batch, batch_B, wait_B))) > 0
    }
    return sorted(worth, key=lambda batch: (-worth[batch], batch))[:JUMP_CANDIDATES]


def _candidates(
    splits: Mapping[int, Split], base_samples: int, noise_samples: float | None, *, overhead_s: float, hiccups: Hiccups
) -> tuple[BatchCandidate, ...]:
    """Return each batch with its goodput, ascending; while the noise scale is unknown, samples are worth the same."""
    ordered = sorted(splits.items())
    found = []
    for (batch, split), wait_s in zip(ordered, _waits_s([split for _, split in ordered], hiccups), strict=True):
        step_s = split.step_s + wait_s + overhead_s
        worth = 1.0
        if noise_samples is not None:
            worth = statistical_efficiency(batch, base_samples=base_samples, noise_samples=noise_samples)
        rate = batch / step_s
        found.append(
            BatchCandidate(
                samples=batch, step_s=step_s, samples_per_s=rate, efficiency=worth, goodput_per_s=rate * worth
            )
        )
    return tuple(found)


def _chosen(table: Sequence[BatchCandidate], here: int, noise_samples: float | None) -> tuple[int, str]:
    """Return the best batch where it gains enough against the one here, and the reason."""
    if noise_samples is None:
        return here, f"{here} samples, because the noise scale is not known yet"
    best = max(table, key=lambda candidate: (candidate.goodput_per_s, -candidate.samples))
    now = next(candidate for candidate in table if candidate.samples == here)
    gained = best.goodput_per_s / now.goodput_per_s - 1
    why = f"at a noise scale of {noise_samples:.4g} samples"
    if best.samples != here and gained >= LEAST_GAIN:
        return best.samples, f"{best.samples} samples learn {gained:.0%} faster than {here} {why}"
    return here, (
        f"{here} samples stay: the best batch, {best.samples}, would learn {gained:.1%} faster {why}, "
        f"less than {LEAST_GAIN:.0%}"
    )


def _evenly(
    totals: Sequence[int], members: Sequence[SplitMember], *, communication: CommunicationTime
) -> tuple[Split | Infeasible, ...]:
    """Return each batch's split when it is divided as if all members were alike."""
    alike = balance_many(totals, [replace(member, compute=_ALIKE) for member in members])
    return tuple(
        each if isinstance(each, Infeasible) else evaluate(each.shares, members, communication=communication)
        for each in alike
    )


def _waits_s(splits: Sequence[Split], hiccups: Hiccups) -> list[float]:
    """Return how much longer than its slowest member's mean time each step is, because some member has a long step.

    Normal noise is left out: it makes each step longer by nearly the same part, which moves the best batch little. With
    it, each of the candidates would need a quadrature over all members.
    """
    if hiccups.rate <= 0 or not splits:
        return [0.0] * len(splits)
    mean_BW = np.array([split.member_s for split in splits])
    expected_B = expected_maximum_of_hiccups(mean_BW, np.array([split.own_s for split in splits]), hiccups)
    waits: list[float] = (expected_B - mean_BW.max(axis=1)).tolist()
    return waits
