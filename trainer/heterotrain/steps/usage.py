"""Checks on how a script uses a step, with the remedy in each message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from heterotrain.errors import UsageError


def check_backward(
    *, step: int, handed_out: int, backwards: int, is_listed: bool = False, call: str = "step.backward"
) -> None:
    """Check that ``step.backward`` is called once for each micro-batch.

    Args:
        step: number of the step.
        handed_out: micro-batches that ``step.micro_batches`` has yielded.
        backwards: earlier calls of ``step.backward``.
        is_listed: whether the script has taken all micro-batches before the first of these calls.
        call: the present one.

    Raises:
        UsageError: this call is one too many, or a micro-batch was left out.
    """
    if backwards + 1 > handed_out or (backwards + 1 < handed_out and not is_listed):
        raise UsageError(
            f"step {step} has yielded {_micro_batches(handed_out)}, and this is call "
            f"{backwards + 1} of {call}. Call step.backward exactly once for each micro-batch, inside the loop over "
            "step.micro_batches() or over a list of it; step.skip_batch() leaves one out."
        )


def check_apply(
    *,
    step: int,
    optimizers: int,
    is_applied: bool,
    backwards: int,
    expected: int,
    limits: Mapping[str, float | None],
) -> None:
    """Check that ``step.apply`` is called once, after all micro-batches, with sensible arguments.

    Args:
        step: number of the step.
        optimizers: how many were passed.
        is_applied: whether the step, or the current one of its passes, was applied before.
        backwards: calls of ``step.backward``.
        expected: how many there have to be.
        limits: clipping limits by argument name; ``None`` for no limit.

    Raises:
        UsageError: one of these does not hold.
    """
    if not optimizers:
        raise UsageError("step.apply needs at least one optimizer: pass the one that job.optimizer returned")
    if is_applied:
        raise UsageError(
            f"step {step} is already applied: call step.apply once for each step, with all its optimizers. A step with "
            "several losses has a loop over step.micro_batches(more=True) for each one but the last"
        )
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise UsageError(f"{name} must be above 0, not {limit}; leave it out to switch clipping off")
    if backwards != expected:
        raise UsageError(
            f"step.apply was called after {backwards} of {_micro_batches(expected)}. Loop over "
            "all of step.micro_batches() and call step.backward for each one."
        )


def check_another_pass(*, step: int, more: bool) -> None:
    """Check that the pass before announced another one.

    Args:
        step: number of the step.
        more: whether it did.

    Raises:
        UsageError: it did not.
    """
    if not more:
        raise UsageError(
            f"step {step} loops over its micro-batches again, but the loop before was to be the last: write "
            "step.micro_batches(more=True) for each pass but the last"
        )


def refuse_other_pass(step: int) -> NoReturn:
    """Refuse a step in which ranks do not agree on whether another pass follows.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"step {step}: some ranks make another pass over their micro-batches (more=True) and others do not: decide "
        "by step.number, step.epoch or values that are the same on every rank"
    )


def check_used(*, step: int, unused: int, parameters: int) -> None:
    """Check that the loss of some rank depends on the model that ``job.wrap`` got.

    Args:
        step: number of the step.
        unused: parameters that got no gradient on any rank, by bits.
        parameters: how many are trained.

    Raises:
        UsageError: none does, so nothing would be trained.
    """
    if parameters and unused == (1 << parameters) - 1:
        raise UsageError(
            f"step {step}: no parameter of the model that job.wrap returned got a gradient, so nothing is trained: "
            "compute the loss with that model, not with a copy, and unfreeze what the loss depends on"
        )


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch" + ("" if count == 1 else "es")


def refuse_update(step: int) -> NoReturn:
    """Refuse ``optimizer.step`` inside ``with step:``: it would come on top of that of ``step.apply``.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"step {step}: call step.apply(optimizer) in place of optimizer.step(), so that all ranks update their weights "
        "or none does"
    )
