"""Determines the end of the training: everything is committed, or a rank's script has ended it."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_core.contract.config import TrainingConfig

from heterotrain.network.control import StepDecision
from heterotrain.network.group import Group
from heterotrain.state.training import TrainState
from heterotrain.steps.columns import AFTER, BEFORE, ENDS
from heterotrain.steps.shutdown import Shutdown


class End:
    """The end of the training, on which all ranks agree.

    Attributes:
        all_end: whether all ranks end it with the last committed step.
        is_over: whether this process has trained to the end, or failed together with all others.
    """

    def __init__(self, shutdown: Shutdown, training: TrainState, config: TrainingConfig) -> None:
        self.all_end = self.is_over = False
        self._shutdown = shutdown
        self._training = training
        self._config = config

    @property
    def is_reached(self) -> bool:
        """Whether nothing is left to train."""
        return self._training.progress.is_over(epochs=self._config.epochs, steps=self._config.steps)

    @property
    def limit(self) -> str:
        """What ends the training, for people."""
        return f"steps: {self._config.steps}" if self._config.steps else f"epochs: {self._config.epochs}"

    def voted(self, decision: StepDecision, *, more: bool) -> None:
        """Note what all ranks have voted in a step; ``more``: another pass of it follows."""
        ends = decision.agreed[ENDS]
        self.all_end = ends == BEFORE or (ends == AFTER and decision.committed and not more)

    def agree(self, group: Group | None) -> None:
        """End the training on all ranks if a hook after an epoch has ended it on one; they call those hooks alike."""
        if group is not None:
            rows = group.gather_now([self._shutdown.ends(self._training.progress.steps)])
            self.all_end = any(row[0] for row in rows)

    def note(self, *, alone: bool) -> None:
        """Note in the progress that the script has ended the training, if it has; ``alone``: there is no other rank."""
        ended = alone and self._shutdown.reason and self._shutdown.ends(self._training.progress.steps) == BEFORE
        if self.all_end or ended:
            self._training.progress = replace(
                self._training.progress, stopped=True, asked_epochs=self._config.epochs,
                asked_steps=self._config.steps or 0,
            )  # fmt: skip
