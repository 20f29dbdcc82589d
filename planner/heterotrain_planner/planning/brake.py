"""Takes back a plan whose steps take far longer than predicted, without waiting for its boundary.

A line through few or disturbed steps may promise much for shares that were never seen. Its plan then trains slowly
until the next boundary. So a plan is compared with its own prediction from its first steps on. It is taken back when a
member's own seconds, and with them the step, exceed the prediction by ``RATIO`` beyond chance. Slowness of all members
at once, as by a busy host, is not the plan's fault and is divided out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_planner.perf.counters import MeanVariance, Observation

RATIO = 1.5
"""Measured over predicted seconds from which on a plan is taken back."""
LEAST_STEPS = 3
"""Steps of each member that are needed."""
LATEST_STEPS = 20
"""Steps that are compared with the prediction."""
FORMER_STEPS = 40
"""Steps before the plan that show the shares before it."""
LEAST_GROWTH = 1.1
"""Share of the slowest member relative to that before the plan, from which on the plan itself is to blame."""
_DEVIATIONS = 2.0
"""Standard errors by which a member has to exceed the ratio: one long step among few is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberInForce:
    """One member with its share in force.

    Attributes:
        share_samples: its share.
        predicted_s: its own seconds of a step by the plan.
        observations: all of its observations, oldest first.
    """

    share_samples: int
    predicted_s: float
    observations: Sequence[Observation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    """Why a plan is taken back, and the shares before it; ``None`` where those are unknown or were not faster."""

    ratio: float
    back_to: tuple[int, ...] | None

    @property
    def reason(self) -> str:
        """The reason in one clause."""
        to = "the shares before are back" if self.back_to else "shares change at the next step"
        return f"a step takes {self.ratio:.1f} times as long as predicted: {to}"


def brake_of(members: Sequence[MemberInForce], *, predicted_step_s: float) -> Brake | None:
    """Return why the plan in force is to be taken back; ``None`` if it may stay.

    Args:
        members: by rank.
        predicted_step_s: by the plan, its mean over noisy steps.
    """
    busy = [member for member in members if member.share_samples > 0 and member.predicted_s > 0]
    latest = [_latest(member) for member in busy]
    found = [each for each in map(_pooled, latest) if each is not None]
    timed = [(each.steps, each.step.mean) for seen in latest for each in seen if each.step is not None]
    if not busy or len(found) < len(busy) or not timed:
        return None
    step_s = sum(steps * mean for steps, mean in timed) / sum(steps for steps, _ in timed)
    means = [mean / member.predicted_s for (mean, _), member in zip(found, busy, strict=True)]
    sure = [(mean - _DEVIATIONS * error) / m.predicted_s for (mean, error), m in zip(found, busy, strict=True)]
    pace = max(1.0, min(means)) if len(busy) > 1 else math.inf
    ratio = step_s / predicted_step_s / pace
    if ratio < RATIO or max(sure) / pace < RATIO:
        return None
    slowest = busy[max(range(len(busy)), key=lambda index: sure[index])]
    return Brake(ratio=step_s / predicted_step_s, back_to=_former(members, slowest, step_s))


def _latest(member: MemberInForce) -> list[Observation]:
    """Return the newest observations at the share in force, without those before it was another one."""
    found: list[Observation] = []
    for each in reversed(member.observations):
        if each.share_samples == member.share_samples and not each.warm_up:
            found.append(each)
        elif found and each.share_samples != member.share_samples:
            break
        if sum(one.steps for one in found) >= LATEST_STEPS:
            break
    return found


def _pooled(observations: Sequence[Observation]) -> tuple[float, float] | None:
    """Return mean own seconds of a step and the mean's standard error; ``None`` for too few steps."""
    known = [(each.steps, own) for each in observations if (own := _own(each)) is not None]
    steps = sum(count for count, _ in known)
    if steps < LEAST_STEPS:
        return None
    mean = sum(count * own.mean for count, own in known) / steps
    square = sum(count * ((own.variance or 0.0) + (own.mean - mean) ** 2) for count, own in known) / (steps - 1)
    return mean, math.sqrt(square / steps)


def _own(observation: Observation) -> MeanVariance | None:
    if observation.compute is not None:
        return observation.compute
    parts = (observation.load, observation.forward, observation.backward, observation.update)
    phases = [phase for phase in parts if phase is not None]
    if not phases:
        return None
    return MeanVariance(
        mean=sum(phase.mean for phase in phases), variance=sum(phase.variance or 0.0 for phase in phases)
    )


def _former(members: Sequence[MemberInForce], slowest: MemberInForce, step_s: float) -> tuple[int, ...] | None:
    """Return the shares of most steps before the plan, if their sum is the same and they can help.

    Their steps were shorter, and the slowest member had less. Where it had not, the member itself has become slower,
    and the shares before would leave it with more.
    """
    shares, before_s = [], []
    for member in members:
        counts: Counter[int] = Counter()
        seconds: dict[int, float] = {}
        for each in reversed(member.observations):
            if each.share_samples == member.share_samples or each.step is None:
                continue
            if counts.total() >= FORMER_STEPS:
                break
            counts[each.share_samples] += each.steps
            seconds[each.share_samples] = seconds.get(each.share_samples, 0.0) + each.steps * each.step.mean
        share = max(counts, key=lambda size: (counts[size], size), default=member.share_samples)
        if member is slowest and share * LEAST_GROWTH > member.share_samples:
            return None
        shares.append(share)
        if counts:
            before_s.append(seconds[share] / counts[share])
    whole = sum(member.share_samples for member in members)
    if sum(shares) != whole or max(before_s, default=math.inf) >= step_s:
        return None
    return tuple(shares)
