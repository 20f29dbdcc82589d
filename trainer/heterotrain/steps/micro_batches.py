"""The micro-batches of one step on this rank, as its script gets them, and the passes over the model that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from heterotrain.errors import PeerLost
from heterotrain.exchange.timeline import Timestamp
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.numerics.method import Numerics
from heterotrain.parts.interface import Share
from heterotrain.steps.clock import Clock, Phase
from heterotrain.steps.task import Task
from heterotrain.steps.usage import check_backward

Fetch = Callable[[Task, int, int], Any]
"""Returns so many samples of a task, from an offset on, as a batch on the device."""


@dataclass(slots=True, kw_only=True)
class MicroBatches:
    """Hands out the micro-batches of a step, and counts what the script does with them.

    Attributes:
        task: this rank's part of the step.
        group: the formation's connections; ``None`` for a process without peers.
        numerics: of the job.
        fetch: see ``Fetch``.
        lockstep: whether every rank gets the same number of micro-batches.
        handed_out: micro-batches of this pass that the script has got.
        backwards: those of which it has run the backward pass.
        padding: additional ones of this pass, with weight zero; they come first.
        anchors: outputs of exchanges in the current micro-batch, through which gradients of other ranks flow.
        mark: the start of the current forward pass.
        is_listed: whether the script has taken all micro-batches before it ran the first backward pass.
        forward: what the current forward pass runs in; ``None`` for nothing.
    """

    task: Task
    group: Group | None
    numerics: Numerics
    fetch: Fetch
    lockstep: bool
    handed_out: int = 0
    backwards: int = 0
    padding: int = 0
    anchors: list[torch.Tensor] = field(default_factory=list)
    mark: Timestamp | None = None
    is_listed: bool = False
    _kept: list[Any] = field(default_factory=list)
    forward: AbstractContextManager[object] | None = None

    @property
    def expected(self) -> int:
        """Backward passes that this pass over the micro-batches needs."""
        own = len(self.task.micro_batches)
        return own + (self.padding or int(not own and self._runs_without_samples))

    @property
    def is_padding(self) -> bool:
        """Whether the sample of the current micro-batch has weight zero."""
        return 0 < (self.backwards + 1 if self.is_listed else self.handed_out) <= self.padding

    @property
    def _runs_without_samples(self) -> bool:
        return self.group is not None and self.numerics.needs_all_ranks

    def check_call(self, call: str) -> None:
        """Check that a micro-batch waits for a backward pass; ``call`` is the script's.

        Raises:
            UsageError: none does, or one was left out.
        """
        check_backward(
            step=self.task.number, handed_out=self.handed_out, backwards=self.backwards, is_listed=self.is_listed,
            call=call,
        )  # fmt: skip

    def begin_again(self) -> None:
        """Begin another pass over the same micro-batches."""
        self.handed_out = self.backwards = 0
        self.mark, self.is_listed = None, False

    def hand_out(self, task: Task, start: int, size: int, *, begun: BegunPass) -> Any:
        """Return a micro-batch and enter its forward pass.

        Args:
            task: where its samples come from.
            start: its first sample in the task.
            size: samples.
            begun: the pass.

        Raises:
            PeerLost: the formation is broken.
        """
        if self.group is not None and self.group.is_over():
            raise PeerLost("the formation broke during the step")
        began = begun.clock.now()
        if begun.again:
            batch = self._kept[self.handed_out]
        else:
            batch = self.fetch(task, start, size)
            if begun.keep:
                self._kept.append(batch)
        self.handed_out += 1
        self.anchors.clear()
        self.mark = begun.clock.spent(Phase.LOAD, began)
        if self.numerics.precision.casts:
            self.enter_forward(self.mark)
        return batch

    def enter_forward(self, mark: Timestamp | None) -> None:
        """Enter the forward pass of a micro-batch that the script has already."""
        self.mark = mark
        self.forward = self.numerics.precision.autocast()
        self.forward.__enter__()

    def leave_forward(self) -> None:
        """Leave the forward pass of the current micro-batch, if it is still in it."""
        forward, self.forward = self.forward, None
        if forward is not None:
            forward.__exit__(None, None, None)

    def missing(self) -> int:
        """Return the number of micro-batches without weight that this rank needs to make the calls of the others.

        Raises:
            PeerLost: the formation is broken.
        """
        own, rounds = len(self.task.micro_batches), self.task.rounds
        if self.group is None or not self.lockstep:
            return rounds - own if rounds else int(not own and self._runs_without_samples)
        self.group.script.begin("step.micro_batches")
        return int(max(row[0] for row in self.group.gather_now([float(max(own, rounds))], Purpose.ROUNDS))) - own


class BegunPass(NamedTuple):
    """A pass over the micro-batches of a step.

    Attributes:
        clock: of the step.
        again: whether it is not the first one, so that it gets the batches which that one kept.
        keep: whether another one follows.
    """

    clock: Clock
    again: bool
    keep: bool


class MicroBatchLoop(Iterator[Any]):
    """One pass of a script over the micro-batches.

    A list of it, ``list(step.micro_batches())``, has everything before the first backward pass, so a script can count
    tokens over all ranks first. The reduction then has to wait for ``step.apply``: at the end of the list, ranks with
    samples have no gradient yet, and those without must not run ahead of the script's exchanges. ``list`` and ``tuple``
    ask for the length first, which loops do not.
    """

    def __init__(self, counts: MicroBatches, *, begin: Callable[[], BegunPass], reduce: Callable[[], object]) -> None:
        """Describe a pass that begins with the first micro-batch.

        Args:
            counts: its micro-batches.
            begin: begins the pass.
            reduce: ends it, as soon as all backward passes have run.
        """
        self._counts, self._begin, self._reduce = counts, begin, reduce
        self._pass: BegunPass | None = None
        self._place = -1
        self._start = 0
        self._is_listed = False

    def __length_hint__(self) -> int:
        """Return a lower limit of the number of micro-batches; only a list asks for it."""
        self._is_listed = True
        return len(self._counts.task.micro_batches)

    def __next__(self) -> Any:
        """Return the next micro-batch, in its forward pass."""
        counts = self._counts
        task, sizes = counts.task, counts.task.micro_batches
        if self._pass is None:
            self._pass = self._begin()
            counts.padding = counts.missing()
        elif counts.forward is not None:
            counts.leave_forward()
        self._place += 1
        number = self._place - counts.padding
        if number < 0:
            task, start, size = task.spare(), 0, 1
        elif number < len(sizes):
            start, size = self._start, sizes[number]
            self._start += size
        else:
            if number == len(sizes):  # and not asked once more
                counts.is_listed = self._is_listed or (counts.handed_out > 0 and not counts.backwards)
                if counts.is_listed and counts.handed_out:
                    counts.enter_forward(None)
                elif not counts.is_listed and counts.backwards == counts.expected:
                    self._reduce()
            raise StopIteration
        return counts.hand_out(task, start, size, begun=self._pass)


def share_of(task: Task, fetch: Fetch) -> Share:
    """Return a task, with at least one micro-batch, for a part that runs all of them by itself."""
    sizes = task.micro_batches
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return Share(
        step=task.number, start=task.position - task.cursor, sizes=sizes, batch_samples=task.batch_samples,
        fetch=lambda index: fetch(task, starts[index], sizes[index]),
    )  # fmt: skip
