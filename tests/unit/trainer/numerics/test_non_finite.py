"""What happens to a step whose loss or gradient is not finite."""

from __future__ import annotations

import pytest
from heterotrain.numerics.non_finite import MOST_SKIPPED, Action, LossHistory, choose_action, describe, remedy
from heterotrain_core.contract.choices import OnNonFinite


@pytest.mark.parametrize(
    ("policy", "loss_scale", "skipped", "expected"),
    [
        (OnNonFinite.FAIL, None, 0, Action.FAIL),
        (OnNonFinite.SKIP, None, 0, Action.SKIP),
        (OnNonFinite.SKIP, None, MOST_SKIPPED - 1, Action.SKIP),
        (OnNonFinite.SKIP, None, MOST_SKIPPED, Action.FAIL),
        (OnNonFinite.IGNORE, None, 0, Action.APPLY),
        (OnNonFinite.FAIL, 2.0, 16, Action.SKIP),
        (OnNonFinite.FAIL, 1.0, 17, Action.FAIL),
        (OnNonFinite.SKIP, 1.0, 17, Action.SKIP),
        (OnNonFinite.IGNORE, 1.0, 17, Action.SKIP),
        (OnNonFinite.IGNORE, 1.0, MOST_SKIPPED, Action.FAIL),
    ],
)
def test_the_action(policy: OnNonFinite, loss_scale: float | None, skipped: int, expected: Action) -> None:
    """fp16 first blames its loss scale; no training skips for ever."""
    assert choose_action(policy, loss_scale=loss_scale, skipped=skipped) is expected


def test_the_history_counts_skipped_steps_and_keeps_the_last_finite_loss() -> None:
    """An applied step ends the count."""
    history = LossHistory().after(0.5, step=3, skipped=False)
    assert history == LossHistory(last_finite=0.5, last_finite_step=3)
    history = history.after(None, step=4, skipped=True).after(None, step=5, skipped=True)
    assert history == LossHistory(last_finite=0.5, last_finite_step=3, skipped=2)
    assert history.after(0.4, step=6, skipped=False) == LossHistory(last_finite=0.4, last_finite_step=6)


def test_the_sentence_names_step_ranks_and_the_last_finite_loss() -> None:
    """Also without a loss before it, and for a gradient alone."""
    known = LossHistory(last_finite=0.25, last_finite_step=11)
    assert describe(step=12, ranks=(1,), gradient_of=None, history=known) == (
        "the loss of step 12 is not finite on rank 1; the last finite loss was 0.25, in step 11"
    )
    assert describe(step=0, ranks=(0, 2), gradient_of=None, history=LossHistory()) == (
        "the loss of step 0 is not finite on ranks 0, 2; no loss before it was finite"
    )
    assert "finite, but the gradient of 0.bias is not" in describe(
        step=12, ranks=(), gradient_of="0.bias", history=known
    )


def test_the_remedy_fits_the_cause() -> None:
    """The precision for fp16, the number of steps after many."""
    assert "clip_norm" in remedy(loss_scale=None, skipped=0)
    assert "BF16" in remedy(loss_scale=1.0, skipped=17)
    assert f"{MOST_SKIPPED} steps before it" in remedy(loss_scale=None, skipped=MOST_SKIPPED)
