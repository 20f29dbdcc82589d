"""Time models of a job's members, fitted once per decision; members without evidence get assumed models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.plan import ComputeTime

from heterotrain_planner.perf.curve import time_curves
from heterotrain_planner.perf.exchange import fit_exchange
from heterotrain_planner.perf.fit import fit_data
from heterotrain_planner.perf.line import ASSUMED, FixedPart
from heterotrain_planner.perf.model import ExchangeModel, FitQuality, MemberModel, at_pace
from heterotrain_planner.perf.regression_data import RegressionData, summarize
from heterotrain_planner.perf.shared_pace import own_variations, remove_shared_pace, shared_slowdown
from heterotrain_planner.perf.step_noise import StepNoise, step_noise
from heterotrain_planner.planning.evidence import MemberEvidence, settled

LEAST_POOL_DEVIATION = 0.03
"""Least standard deviation of the fixed part between members of one pool, relative to their time."""
_SAME_BATCH_RATIO = 1.5
"""Batches within this ratio count as the same: then models may be fitted for the shares of the last steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFits:
    """What the telemetry of a job's members shows, before a global batch is chosen.

    Attributes:
        evidence: the members, by rank.
        former: members that have left.
        data: observations of ``evidence`` and ``former`` as arrays, without the shared pace; ``None`` where none is
            usable.
        alone: the model of each of them from its own data.
        now_ratio: how many times as long as usual steps take lately, for all members.
        exchange: the cluster's exchange.
    """

    evidence: tuple[MemberEvidence, ...]
    former: tuple[MemberEvidence, ...]
    data: tuple[RegressionData | None, ...]
    alone: tuple[MemberModel, ...]
    now_ratio: float
    exchange: ExchangeModel

    def models(self, *, total_samples: int | None = None) -> tuple[MemberModel, ...]:
        """Return the models of the members; see ``all_models``."""
        return self.all_models(total_samples=total_samples)[0]

    def all_models(
        self, *, total_samples: int | None = None
    ) -> tuple[tuple[MemberModel, ...], tuple[MemberModel, ...]]:
        """Return a model for each member: its own, leaning on its pool where it is thin, or an assumed one.

        The second tuple has the models of former members. ``compute`` is ``None`` only where no member was ever
        observed.

        Args:
            total_samples: the global batch for which shares are sought. If it is about the one of the last steps,
                models are fitted to be right near the shares of those steps, in case times are not linear. Otherwise,
                or with ``None``, they are fitted for all shares alike.
        """
        data = self.data[: len(self.evidence)]
        found = self._fitted(near=total_samples is not None and _near(data, total_samples))
        noise = step_noise(data, found)
        variations = own_variations(
            [member.observations for member in self.evidence],
            noise.variations,
            within_parts=noise.within_parts,
            hiccup_variances=noise.hiccup_variances,
        )
        former = self.alone[len(self.evidence) :]
        with_noise = [
            replace(_with_long_steps(model, noise, pace=self.now_ratio), hiccups=noise.hiccups)
            for model in (*found, *former)
        ]
        members = zip(with_noise[: len(found)], variations, strict=True)
        return (
            tuple(replace(model, variation=variation) for model, variation in members),
            tuple(with_noise[len(found) :]),
        )

    def _fitted(self, *, near: bool) -> list[MemberModel]:
        """Return the members' models without the noise of steps, near the shares of the last steps or for all."""
        known = (*self.evidence, *self.former)
        found = []
        for rank, member in enumerate(self.evidence):
            mates = [self.alone[i] for i, m in enumerate(known) if m.pool and m.pool == member.pool and i != rank]
            own = self.alone[rank]
            pooled, mine = pooled_fixed_part(mates), self.data[rank]
            if own.compute is not None and mine is not None and (pooled is not None or near):
                own = fit_data(mine, assumed=pooled or ASSUMED, here_samples=mine.size_now if near else None)
            if own.compute is None:
                own = _assumed(own, member.pool, mates, self.alone)
            found.append(replace(own, pooled=any(map(settled, mates))))
        if near:
            bent = time_curves(self.data[: len(self.evidence)], found, [m.pool for m in self.evidence])
            found = [replace(model, curve=curve) for model, curve in zip(found, bent, strict=True)]
        return found


def fit_members(evidence: Sequence[MemberEvidence], former: Sequence[MemberEvidence] = ()) -> MemberFits:
    """Return the fits of all members: the expensive part of a decision, done once for batch and shares.

    Args:
        evidence: by rank.
        former: members that have left; they show what their pools are like and get no model.
    """
    known = (*evidence, *former)
    raw = [summarize(member.observations) for member in known]
    if any(each is not None and each.drift_ratio != 1.0 for each in raw):
        # When all members slow down, some may just exceed the limit of a change and others not: no reason to differ.
        steady = [summarize(member.observations, steady=True) for member in known]
        shared = shared_slowdown(steady, [fit_data(each) for each in steady])
        raw = [summarize(member.observations, shared=shared) for member in known]
    before = [fit_data(each) for each in raw]
    common = remove_shared_pace(raw, before)
    changed = zip(raw, before, common.data, strict=True)
    return MemberFits(
        evidence=tuple(evidence),
        former=tuple(former),
        data=common.data,
        alone=tuple(model if own is each else fit_data(own) for each, model, own in changed),
        now_ratio=common.now_ratio,
        exchange=fit_exchange([o for member in evidence for o in member.observations]),
    )


def _with_long_steps(model: MemberModel, noise: StepNoise, *, pace: float) -> MemberModel:
    """Return the model with the long steps that its line leaves out, and at this pace.

    Long steps that scale make every sample longer on average; pauses add the same seconds to every step.
    """
    found = at_pace(model, pace * (1 + noise.excess_ratio))
    if found.compute is None or noise.excess_s == 0:
        return found
    return replace(found, compute=replace(found.compute, update_s=found.compute.update_s + noise.excess_s))


def assumed_model(pool: str, known: Sequence[tuple[str, MemberModel]]) -> MemberModel:
    """Return the model to assume of a member that was never observed.

    Args:
        pool: its pool.
        known: models of the others, each with its pool.
    """
    mates = [model for name, model in known if pool and name == pool]
    found = _assumed(fit_data(None), pool, mates, [model for _, model in known])
    return replace(found, pooled=any(map(settled, mates)))


def _assumed(own: MemberModel, pool: str, mates: Sequence[MemberModel], everyone: Sequence[MemberModel]) -> MemberModel:
    """Return the model of a member without usable data: that of its pool's middle member, or of the middle of all."""
    of_pool = _middle(mates)
    like = of_pool or _middle(everyone)
    if like is None:
        return own
    return replace(
        own,
        compute=like.compute,
        variation=like.variation,
        hiccups=like.hiccups,
        quality=FitQuality.THIN,
        largest_share_samples=like.largest_share_samples,
        reason=f"{own.reason}; assumed to be like {f'pool {pool}' if of_pool else 'the middle member'}",
    )


def pooled_fixed_part(models: Sequence[MemberModel]) -> FixedPart | None:
    """Return the fixed part to expect of another member of these models' pool; ``None`` where they do not show it.

    Members of a pool differ in pace more than in shape, so they share the fixed part relative to the time. Their ratios
    are combined by inverse variance, with a variance between members (DerSimonian and Laird 1986).
    """
    seen = [m for m in models if m.compute is not None and m.error is not None and not m.drifted]
    if not seen:
        return None
    size = sum(m.error.centre_samples for m in seen if m.error is not None) / len(seen)
    ratios, variances = [], []
    for model in seen:
        fixed, pace = _fixed(model), _pace(model.compute)
        whole = fixed + pace * size
        if whole > 0 and model.error is not None:
            ratios.append(fixed / whole)
            variances.append((model.error.at(0.0) / whole) ** 2 + 1e-12)
    if not ratios or size <= 0:
        return None
    between = max(LEAST_POOL_DEVIATION**2, _variance_between(ratios, variances))
    weights = [1.0 / (variance + between) for variance in variances]
    mean = sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights)
    # The error for one more member of the pool: the mean's error, and the variance between members.
    return FixedPart(ratio=mean, deviation=math.sqrt(1.0 / sum(weights) + between), of_samples=size, seen=True)


def _variance_between(values: Sequence[float], variances: Sequence[float]) -> float:
    """Return the variance between members beyond the errors of their values (DerSimonian and Laird's moments)."""
    weights = [1.0 / variance for variance in variances]
    whole = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / whole
    excess = sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) - (len(values) - 1)
    free = whole - sum(w * w for w in weights) / whole
    return max(0.0, excess / free) if free > 0 else 0.0


def _near(data: Sequence[RegressionData | None], total_samples: int) -> bool:
    """Return whether the last steps had about this batch; members without data are taken to have average shares."""
    shares = [each.share_now for each in data if each is not None]
    if not shares:
        return False
    batch = sum(shares) * len(data) / len(shares)
    return batch / _SAME_BATCH_RATIO <= total_samples <= batch * _SAME_BATCH_RATIO


def _middle(models: Sequence[MemberModel]) -> MemberModel | None:
    """Return the model of middle speed among the usable ones (the slower of two), ``None`` where there is none."""
    usable = [(_pace(model.compute), i) for i, model in enumerate(models) if model.compute is not None]
    return models[sorted(usable)[len(usable) // 2][1]] if usable else None


def _pace(compute: ComputeTime | None) -> float:
    """Return seconds per sample."""
    return compute.per_sample_s + compute.backward_per_sample_s if compute is not None else 0.0


def _fixed(model: MemberModel) -> float:
    """Return the seconds of a step that do not depend on the share."""
    return model.compute.fixed_s + model.compute.backward_fixed_s if model.compute is not None else 0.0
