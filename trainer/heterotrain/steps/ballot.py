"""This rank's ballot in the vote on a step: features register columns, and each says what this rank has to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import Column, Tally
from heterotrain.steps.columns import CHANGED, LAST, MORE, SAMPLES, SIGNATURE, SUMMED, UNUSED, words
from heterotrain.steps.step_passes import StepPasses


class Voting(NamedTuple):
    """What a rank votes on.

    Attributes:
        step: of which the rank has computed its part, or not.
        active_group: the formation.
        held: the newest plan that this rank holds.
        hooks_follow: whether hooks come next that may take longer than the grace period.
        next_s: how long the step after this one will take.
        steps: that this rank has committed.
    """

    step: StepPasses
    active_group: ActiveGroup
    held: HeldPlan
    hooks_follow: bool
    next_s: float = 0.0
    steps: int = 0


Voice = Callable[[Voting], Sequence[float]]
"""Returns this rank's numbers for a column."""


class StepBallot:
    """The columns of all features, and their voices."""

    def __init__(self, registered: Mapping[Column[Any], Voice]) -> None:
        """Register features, in the same order on every rank."""
        self.tally = Tally([*STEP_COLUMNS, *registered])
        self._voices = [*registered.values()]

    def row(self, voting: Voting, *, ok: bool, loss_sum: float) -> bytes:
        """Return this rank's row; ``ok``: whether it has computed its part, ``loss_sum``: sum of the losses."""
        step, values = voting.step, [*_step(voting)]
        for voice in self._voices:
            values.append(voice(voting))  # noqa: PERF401  # a comprehension is a call, up to Python 3.11
        return self.tally.row(ok, voting.steps, step.weight, loss_sum, values)


STEP_COLUMNS = (SIGNATURE, UNUSED, CHANGED, MORE, SUMMED, SAMPLES)


def _step(voting: Voting) -> tuple[Sequence[float], ...]:
    step = voting.step
    reducer, state, task = step.reducer, step.numerics.forward_state, step.task
    return (
        (reducer.signature,), words(reducer.unused, reducer.parameters), (state.is_active and state.has_news,),
        (step.more,), (step.summed.code_of(task.number),), (task.batch_samples + LAST * task.ends_epoch,),
    )  # fmt: skip
