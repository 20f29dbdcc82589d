"""The micro-batches of one step on this rank, as its script gets them, and the passes over the model that they need."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from heterotrain.errors import PeerLost
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.timeline import Timestamp
from heterotrain.steps.clock import Clock, Phase
from heterotrain.steps.step_context import StepContext
from heterotrain.steps.task import Task


@dataclass(slots=True, kw_only=True)
class MicroBatches:
    """Hands out the micro-batches of a step, and counts what the script does with them.

    Attributes:
        task: this rank's part of the step.
        group: the formation's connections; ``None`` for a process without peers.
        numerics: of the job.
        context: fetches samples.
        lockstep: whether every rank gets the same number of micro-batches.
        handed_out: micro-batches of this pass that the script has got.
        backwards: those of which it has run the backward pass.
        padding: additional ones of this pass, with weight zero; they come first.
        anchors: outputs of exchanges in the current micro-batch, through which gradients of other ranks flow.
        mark: the start of the current forward pass.
    """

    task: Task
    group: Group | None
    numerics: Numerics
    context: StepContext
    lockstep: bool
    handed_out: int = 0
    backwards: int = 0
    padding: int = 0
    anchors: list[torch.Tensor] = field(default_factory=list)
    mark: Timestamp | None = None
    _kept: list[Any] = field(default_factory=list)
    _forward: AbstractContextManager[object] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch, without padding."""
        return self.task.micro_batches

    @property
    def expected(self) -> int:
        """Backward passes that this pass over the micro-batches needs."""
        return len(self.sizes) + (self.padding or int(not self.sizes and self._runs_without_samples))

    @property
    def is_padding(self) -> bool:
        """Whether the sample of the current micro-batch has weight zero."""
        return 0 < self.handed_out <= self.padding

    @property
    def _runs_without_samples(self) -> bool:
        return self.group is not None and self.numerics.needs_all_ranks

    def begin_again(self) -> None:
        """Begin another pass over the same micro-batches."""
        self.handed_out = self.backwards = 0
        self.mark = None

    def hand_out(self, task: Task, start: int, size: int, *, clock: Clock, again: bool, keep: bool) -> Any:
        """Return a micro-batch and enter its forward pass.

        Args:
            task: where its samples come from.
            start: its first sample in the task.
            size: samples.
            clock: of the step.
            again: whether this is another pass, which gets the batches that the first one kept.
            keep: whether another pass follows.

        Raises:
            PeerLost: the formation is broken.
        """
        if self.context.is_broken():
            raise PeerLost("the formation broke during the step")
        began = clock.now()
        if again:
            batch = self._kept[self.handed_out]
        else:
            batch = self.context.fetch(task, start, size)
            if keep:
                self._kept.append(batch)
        self.handed_out += 1
        self.anchors.clear()
        self.mark = clock.spent(Phase.LOAD, began)
        self._forward = self.numerics.precision.autocast()
        self._forward.__enter__()
        return batch

    def leave_forward(self) -> None:
        """Leave the forward pass of the current micro-batch, if it is still in it."""
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.__exit__(None, None, None)

    def missing(self) -> int:
        """Return the number of micro-batches without weight that this rank needs to make the calls of the others.

        Raises:
            PeerLost: the formation is broken.
        """
        own, rounds = len(self.sizes), self.task.rounds
        if self.group is None or not self.lockstep:
            return rounds - own if rounds else int(not own and self._runs_without_samples)
        self.group.begin_script_exchange("step.micro_batches")
        return int(max(row[0] for row in self.group.gather_now([float(max(own, rounds))], Purpose.ROUNDS))) - own
