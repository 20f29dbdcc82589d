"""The script's hooks: functions that all ranks call alike after epochs, or after a number of steps.

A loss during a hook repeats it, so a hook that has not ended on all ranks counts as not run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from heterotrain_core.contract.config import ANY_EPOCHS

from heterotrain.data.progress import Progress
from heterotrain.errors import PeerLost
from heterotrain.membership.interface import ActiveGroup
from heterotrain.state.admission import plain_numbers
from heterotrain.state.snapshot import Snapshot
from heterotrain.state.training import BeforeHooks, TrainState
from heterotrain.steps.leadership import Leadership
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

EpochHook = Callable[[int], Mapping[str, float] | None]
StepsHook = Callable[[int], Mapping[str, float] | None]


class HookContext(Protocol):
    """What hooks need from the training loop; ``steps.loop.Loop`` implements it."""

    @property
    def active_group(self) -> ActiveGroup | None:
        """The current formation; ``None`` between two formations."""

    def seed_alike(self, place: str) -> None:
        """Let all ranks draw the same random numbers from here on."""

    def repeated_on_loss(self) -> AbstractContextManager[None]:
        """Allow exchanges with other ranks: what is done inside is called again after a loss."""

    def rest(self) -> None:
        """Give up what hooks have gathered of the model."""

    def agree_on_end(self) -> None:
        """Wait until all ranks have called their hooks, and agree on whether one of these has ended the training.

        Raises:
            PeerLost: the group broke meanwhile.
        """


class Hooks:
    """The hooks of one script.

    Attributes:
        after_epochs: called with the index of the epoch that has ended.
        after_steps: (every so many steps, hook), called with the number of committed steps.
        epoch_hooks_s: seconds that the last end-of-epoch hooks took; ``None`` before.
    """

    def __init__(self, training: TrainState, report: RankMetrics, leadership: Leadership, *, epochs: int) -> None:
        self.after_epochs: list[EpochHook] = []
        self.after_steps: list[tuple[int, StepsHook]] = []
        self.epoch_hooks_s: float | None = None
        self._training = training
        self._report = report
        self._leadership = leadership
        self._epochs = epochs
        self._where = ""  # while they run

    def report(self, who: str, values: Any) -> None:
        """Export values of the script; the leader also logs them.

        Raises:
            UsageError: a value is not a number.
        """
        found = plain_numbers(who, values)
        self._report.user(found)
        if self._leadership.leads:
            text = ", ".join(f"{name} {value:.6g}" for name, value in found.items())
            _log.info("%s: %s", self._where or f"epoch {self._training.progress.epoch}", text)

    def finish_step(self, context: HookContext) -> bool:
        """Run the hooks that are due after this number of steps, once; return whether there were any.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        progress = self._training.progress
        if progress.hooked == progress.steps:
            return False
        due = [hook for every, hook in self.after_steps if progress.steps % every == 0]
        if not due:
            return False
        context.seed_alike("step hooks")
        self._call(
            context, due, progress.steps, who="a hook of job.every_steps", where=f"{progress.steps} steps done"
        )  # fmt: skip
        self._training.progress = replace(progress, hooked=progress.steps)
        return True

    def are_due(self, steps: int) -> bool:
        """Return whether hooks are called after so many committed steps, whatever ends there."""
        return any(steps % every == 0 for every, _ in self.after_steps)

    def finish_epoch(self, context: HookContext) -> bool:
        """Run the end-of-epoch hooks, once per epoch; return whether an epoch has ended.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        progress = self._training.progress
        if progress.evaluated >= progress.epoch:
            return False
        context.seed_alike("epoch hooks")
        began_s = time.monotonic()
        where = f"epoch {progress.epoch - 1} done"
        if self._epochs < ANY_EPOCHS:
            where += f" ({progress.epoch} of {self._epochs})"
        self._call(
            context, self.after_epochs, progress.epoch - 1, who="a hook of job.on_epoch_end", where=where,
            conclude=context.agree_on_end,
        )  # fmt: skip
        self.epoch_hooks_s = time.monotonic() - began_s
        self._training.progress = replace(progress, evaluated=progress.epoch)
        return True

    def follow(self, progress: Progress) -> bool:
        """Return whether end-of-epoch hooks come next."""
        return progress.evaluated < progress.epoch and bool(self.after_epochs)

    def _call(
        self, context: HookContext, hooks: Sequence[EpochHook | StepsHook], number: int, *, who: str, where: str,
        conclude: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Call hooks in ``eval`` mode without gradients, report what they return, and conclude with the other ranks."""
        model = self._training.model
        if model is None or not hooks:
            conclude()
            self._training.before_hooks = (self._training.progress, BeforeHooks())
            return
        active_group = context.active_group
        alone = active_group is None or active_group.group is None
        before = None if alone else Snapshot(self._training)
        training = model.training
        self._where = where
        model.eval()
        try:
            with torch.no_grad(), context.repeated_on_loss():
                for hook in hooks:
                    values = hook(number)
                    if values is not None:
                        self.report(who, values)
            conclude()
        except PeerLost:
            if before is not None:  # whatever the hooks have stepped so far, they step again
                before.restore()
            raise
        else:
            if before is not None and self._training.own_layout is not None:  # elsewhere nobody goes back
                self._training.before_hooks = (self._training.progress, before)
        finally:
            self._where = ""
            model.train(training)
            context.rest()
