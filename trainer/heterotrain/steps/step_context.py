"""What a step needs from the training loop around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from heterotrain.network.control import StepDecision
from heterotrain.numerics.noise import Measurement
from heterotrain.numerics.non_finite import Action
from heterotrain.parts.interface import SecondPhase
from heterotrain.state.prepared import Confirmation
from heterotrain.steps.task import Task

if TYPE_CHECKING:
    from heterotrain.steps.step import Step


class StepContext(Protocol):
    """What a step needs; ``steps.loop.Loop`` implements it."""

    def enter(self, step: Step) -> None:
        """Prepare for a step's forward passes: random numbers, and copies of what a failed attempt has to restore."""

    def another_pass(self, step: Step) -> None:
        """Prepare for another pass over the micro-batches of a step."""

    def keep_weights(self) -> None:
        """Keep the weights, which the script may change before the step ends."""

    def keep_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Keep the states of optimizers that take a step before the step ends."""

    def measure(self, step: Step) -> Measurement | None:
        """Return the measurement of the step's gradients, or ``None`` if they are not measured."""

    def reduced(self) -> None:
        """Give all ranks the same random numbers, now that they have the same gradients."""

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task, starting at its ``offset``-th, as a batch on the device."""

    def look_ahead(self, task: Task) -> bool:
        """Load samples of the next step while the device computes; return whether any were loaded."""

    def vote(self, step: Step, *, ok: bool) -> StepDecision:
        """Exchange the control vectors and wait for the buckets; raises ``PeerLost``."""

    def confirm(
        self, step: Step, second: SecondPhase, decision: StepDecision, finish: Callable[[Confirmation], None] | None
    ) -> Confirmation:
        """Wait until every rank holds the sums of its own pieces; ``finish`` may apply them later if that is unknown.

        Raises:
            PeerLost: the group broke meanwhile.
        """

    def commit(self, step: Step, decision: StepDecision) -> None:
        """Record a step that all ranks finished."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error that all ranks have found in the same step, when all of them have."""

    def non_finite(self, what: str, action: Action) -> None:
        """Report a step whose loss or gradient is not finite."""

    def is_broken(self) -> bool:
        """Return whether the formation is broken."""

    def open_exchanges(self, *, are_open: bool) -> None:
        """Allow or refuse exchanges of the script with other ranks."""

    def leave_pass(self, reason: str) -> None:
        """Leave a forward or backward pass in the middle, on all ranks of this rank's member."""
