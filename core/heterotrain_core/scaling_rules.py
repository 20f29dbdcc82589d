"""Scaling rules: the learning rate as a function of the batch."""

from __future__ import annotations

import math
from enum import StrEnum

from heterotrain_core.contract.choices import Choice


class Scaling(Choice):
    """The rule that the user chose (``learningRateScaling``)."""

    NONE = "None"
    LINEAR = "Linear"
    SQRT = "Sqrt"
    ADASCALE = "AdaScale"


class Family(StrEnum):
    """Kind of optimizer that the learning rate belongs to."""

    SGD = "sgd"
    ADAPTIVE = "adaptive"
    """Adam and similar: updates are divided by the root of a second moment."""


class Statistics(StrEnum):
    """Gradients whose noise scale a rule needs."""

    PLAIN = "plain"
    PRECONDITIONED = "preconditioned"
    """Each gradient divided elementwise by ``sqrt(v_hat) + eps``: the optimizer's actual step."""


def needed_statistics(scaling: Scaling, family: Family) -> Statistics | None:
    """Return the gradients whose noise scale the rule needs, ``None`` when it needs none.

    It only depends on rule and optimizer: with an adaptive optimizer, plain statistics would describe steps that are
    not taken.
    """
    if scaling is not Scaling.ADASCALE:
        return None
    return Statistics.PRECONDITIONED if family is Family.ADAPTIVE else Statistics.PLAIN


def gain(*, samples: float, base_samples: float, noise_samples: float) -> float:
    """Return the number of steps of the base batch that one step of ``samples`` equals, in [1, samples / base].

    ``(var/B_0 + sqr) / (var/B + sqr)`` with ``phi = var/sqr``, from AdaScale (Johnson et al. 2020); a batch below the
    base counts for less than one step by the same formula.

    Args:
        samples: the batch B.
        base_samples: the batch B_0 that the user's learning rate was chosen for.
        noise_samples: phi, at least 0.
    """
    return (noise_samples / base_samples + 1.0) / (noise_samples / samples + 1.0)


def learning_rate_scale(
    scaling: Scaling,
    *,
    family: Family,
    samples: int,
    base_samples: int,
    noise_samples: float | None = None,
) -> float:
    """Return the factor on the user's learning rate for a batch of ``samples``.

    Linear: ``B/B_0`` (Goyal et al. 2017). Sqrt: its root. AdaScale: the gain for SGD, the gain's root for adaptive
    optimizers. While the noise scale is unknown, the rate is not scaled, which is safe at any batch.

    Args:
        scaling: the rule.
        family: kind of optimizer; matters for AdaScale only.
        samples: the global batch, at least 1.
        base_samples: the batch that the user's rate was chosen for, at least 1.
        noise_samples: phi of ``needed_statistics``; ``None`` while unknown.
    """
    ratio = samples / base_samples
    if scaling is Scaling.LINEAR:
        return ratio
    if scaling is Scaling.SQRT:
        return math.sqrt(ratio)
    if scaling is Scaling.NONE or noise_samples is None or not math.isfinite(noise_samples):
        return 1.0
    worth = gain(samples=samples, base_samples=base_samples, noise_samples=max(0.0, noise_samples))
    return math.sqrt(worth) if family is Family.ADAPTIVE else worth


def warmed_up(scale: float, *, since_samples: float, warm_up_samples: float, before: float = 1.0) -> float:
    """Return the factor during warm-up: a straight line from ``before`` to ``scale`` over ``warm_up_samples``.

    A sudden large factor diverges early in training (Goyal et al. 2017, gradual warm-up). It counts samples instead of
    steps, so that a change of batch in the middle does not stretch it.
    """
    if warm_up_samples <= 0 or since_samples >= warm_up_samples:
        return scale
    return before + (scale - before) * max(0.0, since_samples) / warm_up_samples
