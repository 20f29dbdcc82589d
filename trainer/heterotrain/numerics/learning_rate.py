"""The factor on the user's learning rate while the global batch differs from the batch that the rate was chosen for.

Every rank computes it in every step from replicated values: the rule, the plan's global batch, the base batch and the
noise averages. Its own state is sent to joining ranks and saved in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from heterotrain_core.scaling_rules import Family, Scaling, learning_rate_scale, warmed_up

from heterotrain.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The state of the factor.

    Attributes:
        batch_samples: current global batch; 0 before the first step.
        since_samples: committed samples when that batch took effect.
        before: factor before that.
        factor: factor of the last step.
        worth_steps: progress of all steps so far, in steps of the base batch; the time of schedules.
    """

    batch_samples: int = 0
    since_samples: int = 0
    before: float = 1.0
    factor: float = 1.0
    worth_steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePolicy:
    """The user's rule.

    Attributes:
        scaling: how the factor follows the batch.
        base_samples: the batch that the user's rate was chosen for.
        warm_up_samples: samples over which a changed factor takes effect.
    """

    scaling: Scaling
    base_samples: int
    warm_up_samples: int

    def next(
        self, rate: Rate, *, family: Family, batch_samples: int, done_samples: int, noise_samples: float | None
    ) -> Rate:
        """Return the state of the factor in the next step.

        The rule decides how many steps of the base batch a step is worth: the gain for AdaScale (its scale-invariant
        schedule), the ratio of the batches for linear and sqrt (equal samples, equal progress), and one without a rule.

        Args:
            rate: state after the last committed step.
            family: kind of optimizer.
            batch_samples: the plan's global batch, also in an epoch's short last step.
            done_samples: samples committed so far.
            noise_samples: phi of the gradients that the rule needs; ``None`` while unknown.
        """
        if self.scaling is Scaling.NONE and rate.batch_samples == batch_samples and rate.before == 1.0 == rate.factor:
            worth = rate.worth_steps + 1.0
            return Rate(batch_samples=batch_samples, since_samples=rate.since_samples, worth_steps=worth)
        if rate.batch_samples != batch_samples:
            rate = replace(rate, batch_samples=batch_samples, since_samples=done_samples, before=rate.factor)
        target = learning_rate_scale(
            self.scaling,
            family=family,
            samples=batch_samples,
            base_samples=self.base_samples,
            noise_samples=noise_samples,
        )
        if self.scaling is Scaling.NONE:
            worth = 1.0
        elif self.scaling is Scaling.ADASCALE:
            worth = target**2 if family is Family.ADAPTIVE else target
        else:
            worth = batch_samples / self.base_samples
        factor = warmed_up(
            target,
            since_samples=done_samples - rate.since_samples,
            warm_up_samples=self.warm_up_samples,
            before=rate.before,
        )
        return replace(rate, factor=factor, worth_steps=rate.worth_steps + worth)


def schedule_steps(before: Rate, after: Rate) -> int:
    """Return how often to step the schedulers between the two states: once for each completed base step."""
    return math.floor(after.worth_steps + 1e-9) - math.floor(before.worth_steps + 1e-9)


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """Return the optimizer's kind; ``None`` if this library does not know how it divides gradients."""
    if isinstance(optimizer, torch.optim.SGD):
        return Family.SGD
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.NAdam):
        return Family.ADAPTIVE
    return None


def check(scaling: Scaling, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse a rule that cannot be applied to the job's optimizers.

    Raises:
        UsageError: AdaScale with an unknown kind of optimizer, or with several kinds, whose steps have different worth.
    """
    if scaling is not Scaling.ADASCALE:
        return
    for optimizer in optimizers:
        if family_of(optimizer) is None:
            raise UsageError(
                f"learningRateScaling adascale does not support {type(optimizer).__name__}. "
                "Use SGD, Adam, AdamW or NAdam, or the rule linear, sqrt or none."
            )
        if family_of(optimizer) is not family_of(optimizers[0]):
            raise UsageError(
                f"learningRateScaling adascale cannot combine {type(optimizers[0]).__name__} and "
                f"{type(optimizer).__name__}, whose steps have different worth. Use one kind of optimizer, or the rule "
                "linear, sqrt or none."
            )


def scaled_rates(optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[Rate]) -> tuple[float, ...]:
    """Return the learning rate of each parameter group of each optimizer, with the factor of the optimizer's rate.

    NaN where an optimizer has no learning rate.
    """
    found = []
    for optimizer, rate in zip(optimizers, rates, strict=True):
        for group in optimizer.param_groups:
            own = group.get("lr")
            found.append(math.nan if own is None else float(own) * rate.factor)
    return tuple(found)


def step_scaled(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Take the optimizer's step with all learning rates times ``factor``; schedulers see the user's own rates."""
    if factor == 1.0:
        optimizer.step()
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
