"""The pace that all members of a job share: other work on a common host, a clock or a quota slows them at once.

The shared pace does not affect which shares are best, but on a shared machine it causes most of the variation, and it
lasts from step to step. So it is removed before each member's line is fitted; the rest is nearly independent between
steps and between members. ``r`` is the logarithm of a time over the member's own line, averaged over an observation.
Members make the same steps, so at one time

    r_i = c + e_i,      c common to all members, e_i of member i alone, with variance s² / steps

c is the mean over members, shrunk by its excess over the mean that the e_i alone would have (James and Stein):
``1 - s² / mean(steps c²)``. docs/adr/0017 has the measured gain. Legend: ``O`` observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from heterotrain_core.contract.plan import ComputeTime

from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.line import TINY_S, Floats
from heterotrain_planner.perf.model import MemberModel
from heterotrain_planner.perf.regression_data import RegressionData, SharedSlowdown

NOW_STEPS = 40
"""Last steps whose shared pace is expected to continue; differences between members are remembered longer."""
SMOOTH_STEPS = 4
"""Least steps over which the shared pace is averaged.

Shares sum to the batch, so some rise when others fall. Within a step, wrong slopes could therefore look like a shared
pace; over both vectors of a probe they cannot.
"""
SHARED_STEPS = 8
"""The same where a change of one member's speed is distinguished from a change of all."""
_LARGEST = math.log(1.5)
"""Cap on a logarithmic distance: one member's change of speed must not become a shared one, even with few members."""
_ALONE_RATIO = 1.5
"""Weight of all members in an observation's time over its own, up to which the member counts as alone."""
_LEAST_OWN_PART = 0.3
"""Least part of a member's deviation that is its own, because variances of few steps are known badly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPace:
    """The members' data without their shared pace, and the current shared pace.

    Attributes:
        data: as given, but with every observation scaled to the usual shared pace; ``None`` stays.
        now_ratio: how many times as long as usual steps take lately, for all members.
    """

    data: tuple[RegressionData | None, ...]
    now_ratio: float = 1.0


def remove_shared_pace(data: Sequence[RegressionData | None], models: Sequence[MemberModel]) -> SharedPace:
    """Return the data without the shared pace, and the shared pace of the last steps.

    Args:
        data: of all known members, including those that have left; they need not overlap in time.
        models: their fits, which may still contain the shared pace.
    """
    tracks = _tracks(data, models)
    if len(tracks) < 2:  # noqa: PLR2004  # a single member shares its pace with no other
        return SharedPace(data=tuple(data))
    at_s = np.unique(np.concatenate([track.at_s for track in tracks.values()]))
    weight = np.sum([np.interp(at_s, track.at_s, track.weight) for track in tracks.values()], axis=0)
    missed = np.sum([np.interp(at_s, track.at_s, track.missed) for track in tracks.values()], axis=0)
    all_members = _Track(at_s=at_s, steps=np.zeros_like(at_s), weight=weight, missed=missed)
    common: dict[int, Floats] = {}
    own = between = windows = 0.0
    for number, track in tracks.items():
        from_s, until_s = track.windows()
        mean, whole = all_members.mean(from_s, until_s)
        mine, part = track.mean(from_s, until_s)
        shared = whole > _ALONE_RATIO * part
        common[number] = np.where(shared, mean, 0.0)
        mean, whole, mine, part = mean[shared], whole[shared], mine[shared], part[shared]
        own += float((part * (mine - mean) ** 2 / (1 - part / whole)).sum())
        between += float((whole * mean**2).sum())
        windows += max(1.0, track.steps[-1] / SMOOTH_STEPS) * bool(len(mean))
    times = windows / len(tracks)
    if between <= 0 or times < 1:
        return SharedPace(data=tuple(data))
    # Without a shared pace, own and between are equal up to the deviation of a mean of squares over so many times.
    shrunk = max(0.0, 1 - (1 + math.sqrt(2 / times)) * own / between)
    if shrunk == 0:
        return SharedPace(data=tuple(data))
    found: list[RegressionData | None] = list(data)
    for number, seen in enumerate(data):
        if seen is not None and number in common:
            of_O = np.searchsorted(tracks[number].at_s[1:], seen.ended_s_O)
            found[number] = replace(seen, seconds_O=seen.seconds_O * np.exp(-shrunk * common[number][of_O]))
    newest = max(tracks.values(), key=lambda track: float(track.at_s[-1]))
    since_s = np.interp(newest.steps[-1:] - NOW_STEPS, newest.steps, newest.at_s)
    now, _ = all_members.mean(since_s, at_s[-1:])
    return SharedPace(data=tuple(found), now_ratio=math.exp(shrunk * float(now[0])))


def shared_slowdown(data: Sequence[RegressionData | None], models: Sequence[MemberModel]) -> SharedSlowdown | None:
    """Return the slowdown of all members at each time, ``None`` with fewer than two usable members.

    It helps to decide whether one member's speed changed. A mean would move with that member, so it is the least of the
    distances of all members present where these have the same sign, otherwise nothing.

    Args:
        data: of all known members, summarized without a search for changes of speed.
        models: their fits.
    """
    tracks = list(_tracks(data, models).values())
    if len(tracks) < 2:  # noqa: PLR2004  # a single member shares its pace with no other
        return None
    at_s = np.unique(np.concatenate([track.at_s[1:] for track in tracks]))
    there, least, most = np.zeros(len(at_s)), np.full(len(at_s), math.inf), np.full(len(at_s), -math.inf)
    for track in tracks:
        present = (at_s >= track.at_s[0]) & (at_s <= track.at_s[-1])
        middle = np.interp(at_s, track.at_s, track.steps)
        begin = np.clip(middle - SHARED_STEPS / 2, 0.0, max(0.0, track.steps[-1] - SHARED_STEPS))
        end = np.minimum(np.maximum(middle + SHARED_STEPS / 2, begin + SHARED_STEPS), track.steps[-1])
        mean, _ = track.mean(np.interp(begin, track.steps, track.at_s), np.interp(end, track.steps, track.at_s))
        there += present
        least = np.where(present, np.minimum(least, mean), least)
        most = np.where(present, np.maximum(most, mean), most)
    log_ratio = np.where(there > 1, np.maximum(least, 0.0) + np.minimum(most, 0.0), 0.0)
    return SharedSlowdown(at_s=at_s, log_ratio=log_ratio)


def _tracks(data: Sequence[RegressionData | None], models: Sequence[MemberModel]) -> dict[int, _Track]:
    return {
        number: _Track.of(seen, model.compute)
        for number, (seen, model) in enumerate(zip(data, models, strict=True))
        if seen is not None and model.compute is not None
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Track:
    """One member's steps, their weight, and their weighted distance from its line, each summed up to each time."""

    at_s: Floats
    steps: Floats
    weight: Floats
    missed: Floats

    @classmethod
    def of(cls, seen: RegressionData, line: ComputeTime) -> _Track:
        rate = line.per_sample_s + line.backward_per_sample_s
        fixed = line.fixed_s + line.backward_fixed_s
        expected_O = np.maximum(rate * seen.size_O + fixed, TINY_S)
        distance_O = np.clip(np.log(np.maximum(seen.seconds_O, TINY_S) / expected_O), -_LARGEST, _LARGEST)
        ends_s, place_O = np.unique(seen.ended_s_O, return_inverse=True)

        def summed(values_O: Floats) -> Floats:
            return np.concatenate([[0.0], np.cumsum(np.bincount(place_O, weights=values_O))])

        return cls(
            at_s=np.concatenate([[float(seen.began_s_O.min())], ends_s]),
            steps=summed(seen.steps_O),
            weight=summed(seen.precision_O),
            missed=summed(seen.precision_O * distance_O),
        )

    def windows(self) -> tuple[Floats, Floats]:
        """Return the interval for each scrape: its own time, or a longer one where it holds few steps."""
        middle = (self.steps[1:] + self.steps[:-1]) / 2
        half = np.maximum(np.diff(self.steps), SMOOTH_STEPS) / 2
        begin = np.clip(middle - half, 0.0, max(0.0, self.steps[-1] - SMOOTH_STEPS))
        end = np.minimum(np.maximum(middle + half, begin + SMOOTH_STEPS), self.steps[-1])
        return np.interp(begin, self.steps, self.at_s), np.interp(end, self.steps, self.at_s)

    def mean(self, from_s: Floats, until_s: Floats) -> tuple[Floats, Floats]:
        """Return the mean distance within intervals, and its weight; both are 0 where there was no step."""
        weight = np.interp(until_s, self.at_s, self.weight) - np.interp(from_s, self.at_s, self.weight)
        missed = np.interp(until_s, self.at_s, self.missed) - np.interp(from_s, self.at_s, self.missed)
        return np.where(weight > 0, missed / np.maximum(weight, TINY_S), 0.0), weight


def own_variations(
    observations: Sequence[Sequence[Observation]],
    variations: Sequence[float],
    *,
    within_parts: Sequence[float] | None = None,
    hiccup_variances: Sequence[float] = (),
) -> tuple[float, ...]:
    """Return each member's relative deviation of a step without the part that all members share.

    The step ends with the last member. So within the steps of one observation ``cov(step, compute_i) / (step
    compute_i)`` is the shared variance v, plus the own variance of the last member: for normal times ``v + p_i
    own_i²``, with the probability p_i that i is the last (Stein's lemma); the p_i sum to 1. The covariance follows from
    the three exported variances, because synchronisation is the step without compute. Where the exchange takes part of
    the step, v is too small rather than too large.

    Args:
        observations: by member, for the members of the current plan.
        variations: total relative deviations without hiccups, one for each member.
        within_parts: how much of a member's variance within an observation is in its variation; ``None`` for all.
            Between observations, the shared part was removed before.
        hiccup_variances: relative variance that rare long steps add, by member; empty without any. In these a member is
            the last, so they are in the covariance of each member.
    """
    found = [mean for mean in map(_with_step, observations) if mean is not None]
    if len(found) < 2 or len(found) < len(observations):  # noqa: PLR2004  # as above
        return tuple(variations)
    long = hiccup_variances or [0.0] * len(found)
    own = sum(max(0.0, variance - more) for (_, variance), more in zip(found, long, strict=True)) / len(found)
    shared = sum(covariance - more for (covariance, _), more in zip(found, long, strict=True))
    common = max(0.0, (shared - own) / (len(found) - 1))
    parts = [1.0] * len(variations) if within_parts is None else within_parts
    return tuple(
        math.sqrt(max(v * v - part * common, (_LEAST_OWN_PART * v) ** 2))
        for v, part in zip(variations, parts, strict=True)
    )


def _with_step(observations: Sequence[Observation]) -> tuple[float, float] | None:
    """Return the mean relative covariance of compute with the step, and variance of compute, within observations."""
    covariance = variance = weight = 0.0
    for o in observations:
        if o.warm_up or o.steps < 2:  # noqa: PLR2004  # one step has no spread
            continue
        spreads = [_spread(moments) for moments in (o.step, o.compute, o.sync)]
        if o.step is None or o.compute is None or None in spreads or min(o.step.mean, o.compute.mean) < TINY_S:
            continue
        step, compute, sync = (spread or 0.0 for spread in spreads)
        covariance += (o.steps - 1) * (step + compute - sync) / 2 / (o.step.mean * o.compute.mean)
        variance += (o.steps - 1) * compute / o.compute.mean**2
        weight += o.steps - 1
    return (covariance / weight, variance / weight) if weight else None


def _spread(moments: MeanVariance | None) -> float | None:
    return moments.variance if moments is not None else None
