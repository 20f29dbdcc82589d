"""One step as a transaction: committed by all ranks or by none.

``with step:`` swallows what ends an attempt through no fault of the script (a lost peer, another rank's vote, too little
memory); the iterator then yields the same step again, with the same samples, random numbers and buffers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from heterotrain.control import Verdict
from heterotrain.errors import PeerLost, RepeatStep, UsageError
from heterotrain.group import Group
from heterotrain.reducer import Reducer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What this rank has to do in one step.

    Attributes:
        epoch: epoch of the step, from 0.
        number: committed steps before it.
        batch_samples: samples of the step over all ranks.
        shares: samples by rank.
        rank: this rank in the process group.
        cursor: committed samples of the epoch before it.
        ids: this rank's samples, as indices into the data set.
        micro_batches: sizes into which they are cut.
    """

    epoch: int
    number: int
    batch_samples: int
    shares: tuple[int, ...]
    rank: int
    cursor: int
    ids: tuple[int, ...]
    micro_batches: tuple[int, ...]

    @property
    def share_samples(self) -> int:
        """This rank's samples."""
        return len(self.ids)


@dataclass(slots=True)
class Clock:
    """Seconds of this attempt's phases; communication is not in ``backward_s``, waiting only in ``sync_s``."""

    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    sync_s: float = 0.0
    update_s: float = 0.0
    first_bucket_ratio: float | None = None


class Host(Protocol):
    """What a step needs of its job."""

    def fetch(self, task: Task, offset: int, size: int) -> Any:
        """Return ``size`` samples of the task from its ``offset``-th on, as a batch on the device."""

    def vote(self, step: Step, *, ok: bool) -> Verdict:
        """Exchange the control vector and wait for the buckets."""

    def commit(self, step: Step, decision: Verdict) -> None:
        """Everything that follows a step that all ranks finished."""

    def is_broken(self) -> bool:
        """Return whether the formation is known to be broken."""


@dataclass(slots=True)
class Step:
    """One step of the training loop."""

    task: Task
    reducer: Reducer
    group: Group | None
    host: Host
    on_launch: Callable[[torch.Tensor], None] | None = None
    clock: Clock = field(default_factory=Clock)
    committed: bool = False
    failure: Exception | None = None
    weight: float = 0.0
    loss_sum: torch.Tensor | float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    _handed_out: int = 0
    _backwards: int = 0
    _mark_s: float = math.nan
    _voted: bool = False

    @property
    def epoch(self) -> int:
        """Epoch, from 0."""
        return self.task.epoch

    @property
    def number(self) -> int:
        """Committed steps before this one, since the job began."""
        return self.task.number

    @property
    def batch_samples(self) -> int:
        """Samples of this step over all ranks."""
        return self.task.batch_samples

    @property
    def share_samples(self) -> int:
        """Samples of this step on this rank."""
        return self.task.share_samples

    def micro_batches(self) -> Iterator[Any]:
        """Yield this rank's share of the batch, cut to fit memory; nothing when the share is zero."""
        start = 0
        for size in self.task.micro_batches:
            if self.host.is_broken():
                raise PeerLost("the formation broke during the step")
            began_s = time.perf_counter()
            batch = self.host.fetch(self.task, start, size)
            start += size
            self._handed_out += 1
            self._mark_s = time.perf_counter()
            self.clock.load_s += self._mark_s - began_s
            yield batch

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradient.

        Args:
            loss: the mean over the micro-batch's samples; or, with ``weight``, a sum.
            weight: how much went into the sum (tokens that count, for instance). The step's gradient is that of the sum
                over all ranks divided by the sum of all weights.

        Raises:
            UsageError: it was called more or less often than once for each micro-batch, or the loss is no scalar.
        """
        began_s = time.perf_counter()
        self.clock.forward_s += began_s - self._mark_s
        if self._backwards + 1 != self._handed_out:
            raise UsageError(
                "call step.backward exactly once for each micro-batch, inside the loop over micro_batches()"
            )
        if loss.numel() != 1:
            raise UsageError(f"step.backward needs a scalar loss, not one of shape {tuple(loss.shape)}: take its mean")
        samples = self.task.micro_batches[self._backwards]
        self._backwards += 1
        self.weight += float(samples if weight is None else weight)
        value = loss.detach().float()
        self.loss_sum = self.loss_sum + (value * samples if weight is None else value)
        scaled = loss * ((samples if weight is None else 1.0) / self.task.batch_samples)
        last = self._backwards == len(self.task.micro_batches)
        if last:
            self.reducer.arm(self.group, on_launch=self.on_launch)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ended_s = time.perf_counter()
        self.clock.backward_s += ended_s - began_s
        if last:
            self.reducer.flush()
            timing = self.reducer.timing
            length_s = ended_s - timing.backward_began_s
            if length_s > 0:
                self.clock.first_bucket_ratio = min(1.0, (timing.first_bucket_s - timing.backward_began_s) / length_s)

    def apply(self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None) -> None:
        """Reduce the gradient over all ranks, clip it, update the model and advance.

        Args:
            optimizer: one that ``job.optimizer`` returned.
            clip_norm: greatest norm of the step's gradient; ``None`` leaves it alone.

        Raises:
            UsageError: some micro-batch had no ``step.backward``, or the step was applied before.
        """
        if self.committed:
            raise UsageError("call step.apply once for each step")
        if self._backwards != len(self.task.micro_batches):
            raise UsageError(
                f"step.apply came after {self._backwards} of {len(self.task.micro_batches)} micro-batches: "
                "loop over all of step.micro_batches() and call step.backward in each"
            )
        self._without_samples()
        began_s = time.perf_counter()
        decision = self._vote(ok=True)
        reduced_s = time.perf_counter()
        self.clock.sync_s = reduced_s - began_s
        if not decision.committed:
            raise RepeatStep("another rank could not finish its part")
        if decision.weight != self.task.batch_samples:
            self.reducer.scale(self.task.batch_samples / decision.weight if decision.weight > 0 else 0.0)
        if clip_norm is not None:
            self._clip(clip_norm)
        optimizer.step()
        self.clock.update_s = time.perf_counter() - reduced_s
        self.committed = True
        self.host.commit(self, decision)

    def log(self, **values: float) -> None:
        """Report values of this step; they are dropped when the step is repeated."""
        self.logged.update(values)

    # -- the transaction ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            if not self.committed:
                raise UsageError("the step ended without step.apply(optimizer)")
            return False
        if self.committed or not isinstance(error, Exception):
            return False
        if isinstance(error, PeerLost | RepeatStep):
            self.failure = error
        elif isinstance(error, torch.OutOfMemoryError) and not self._voted:
            self.failure = error
            self._stand_down()
        elif isinstance(error, RuntimeError) and self.host.is_broken():
            self.failure = PeerLost(str(error))  # a collective inside the model failed with the formation
        else:
            return False
        _log.info("step %d is repeated: %s", self.task.number, error)
        return True

    def _stand_down(self) -> None:
        """After running out of memory: when peers already add this rank's buckets up, all of them have to repeat."""
        if self._backwards < len(self.task.micro_batches):
            return  # nobody has seen anything of this step yet
        try:
            self.reducer.flush()
            self._vote(ok=False)
        except PeerLost as lost:
            self.failure = lost

    def _without_samples(self) -> None:
        if not self.task.micro_batches:
            self.reducer.arm(self.group, on_launch=self.on_launch)
            self.reducer.flush()

    def _vote(self, *, ok: bool) -> Verdict:
        self._voted = True
        return self.host.vote(self, ok=ok)

    def _clip(self, limit: float) -> None:
        norm = float(self.reducer.squared_norm().sqrt())
        if norm > limit:
            self.reducer.scale(limit / norm)
