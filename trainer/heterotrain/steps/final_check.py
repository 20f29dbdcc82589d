"""Checks the weights before a training may end successfully."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from heterotrain.errors import Diverged, NonFinite
from heterotrain.membership.interface import ActiveGroup
from heterotrain.state.finite import first_non_finite
from heterotrain.state.training import TrainState
from heterotrain.steps.replicas import Replicas


def check_result(
    training: TrainState, active_group: ActiveGroup | None, replicas: Replicas | None, *,
    fail: Callable[[Exception], NoReturn],
) -> None:  # fmt: skip
    """Refuse to end the training successfully with weights that are not finite, or that differ between ranks.

    Args:
        training: the state.
        active_group: the current formation; ``None`` for a rank that the others no longer need.
        replicas: compares the ranks' copies; ``None`` where ranks hold different parts.
        fail: raises the error when all ranks have found it.

    Raises:
        NonFinite: the weights of some rank are not finite.
        Diverged: the state differs between ranks, and the job is to fail then.
        PeerLost: the group broke meanwhile.
    """
    group = None if active_group is None else active_group.group
    name = first_non_finite(training.layout.named_parameters()) if training.model is not None else None
    flags = [[float(name is not None)]] if group is None else group.gather_now([float(name is not None)])
    if any(flag[0] for flag in flags):
        which = f"parameter {name}" if name is not None else "a parameter on another rank"
        fail(NonFinite(
            f"the training is complete, but {which} is not finite: the result is useless. Train again with "
            "onNonFinite: Fail to find the first such step, or with a lower learning rate"
        ))  # fmt: skip
    if active_group is not None and replicas is not None:
        try:
            replicas.judge_result(active_group)
        except Diverged as error:
            fail(error)
