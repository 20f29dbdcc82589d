"""Decides about a step whose loss or gradient is not finite, the same on all ranks.

The loss of every rank is in the control vector, and the summed gradient has the same bits on every rank. So all ranks
find the same step, before it has changed the weights, and decide the same without another message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from heterotrain_core.contract.choices import OnNonFinite

MOST_SKIPPED = 100
"""Steps that may be skipped one after the other. A training that skips more learns nothing, whatever it reports."""


class Action(Enum):
    """What a rank does with a step."""

    APPLY = auto()
    SKIP = auto()
    FAIL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossHistory:
    """The newest finite loss, and the steps skipped since the last applied one; replicated state.

    Attributes:
        last_finite: the mean loss of the newest step in which it was finite; ``None`` before the first one.
        last_finite_step: number of that step.
        skipped: steps skipped one after the other, up to now.
    """

    last_finite: float | None = None
    last_finite_step: int = -1
    skipped: int = 0

    def after(self, loss: float | None, *, step: int, skipped: bool) -> LossHistory:
        """Return the history after a committed step with this mean loss; ``None`` for an unknown or unusable one."""
        last = (self.last_finite, self.last_finite_step) if loss is None else (loss, step)
        return LossHistory(last_finite=last[0], last_finite_step=last[1], skipped=self.skipped + 1 if skipped else 0)


def choose_action(policy: OnNonFinite, *, loss_scale: float | None, skipped: int) -> Action:
    """Return what to do with a step whose loss or gradient is not finite.

    Args:
        policy: the user's setting.
        loss_scale: the factor on the loss in fp16; ``None`` in other formats. Above 1 the factor is to blame, as far as
            anybody knows yet: the step is skipped and the factor halved.
        skipped: steps skipped just before this one.
    """
    if loss_scale is not None and loss_scale > 1.0:
        return Action.SKIP
    if policy is OnNonFinite.FAIL or skipped >= MOST_SKIPPED:
        return Action.FAIL
    if policy is OnNonFinite.SKIP or loss_scale is not None:
        return Action.SKIP
    return Action.APPLY


def describe(*, step: int, ranks: Sequence[int], gradient_of: str | None, history: LossHistory) -> str:
    """Return one sentence on what is not finite, and the last finite loss.

    Args:
        step: number of the step.
        ranks: ranks with a loss that is not finite; empty if only the gradient is not.
        gradient_of: the first parameter whose gradient is not finite; ``None`` if it was not looked for.
        history: the steps before.
    """
    if ranks:
        what = f"the loss of step {step} is not finite on {_ranks(ranks)}"
    else:
        what = f"the loss of step {step} is finite, but the gradient of {gradient_of} is not"
    if history.last_finite is None:
        return f"{what}; no loss before it was finite"
    return f"{what}; the last finite loss was {history.last_finite:.6g}, in step {history.last_finite_step}"


def remedy(*, loss_scale: float | None, skipped: int) -> str:
    """Return what a user can do about a step that ends the training."""
    advice = "lower the learning rate, clip the gradient (step.apply(optimizer, clip_norm=…)), or look for bad samples"
    if skipped >= MOST_SKIPPED:
        return f"{skipped} steps before it were skipped for the same reason, and nothing is learned: {advice}"
    if loss_scale is not None:
        advice = f"fp16 has no smaller loss scale than 1: use precision BF16 or FP32, {advice}"
    return (
        f"The weights are those before the step. To go on from them, {advice}; onNonFinite Skip leaves such steps out"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
