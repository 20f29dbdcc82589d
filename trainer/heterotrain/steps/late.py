"""A step whose update is queued, and which is confirmed right before the vote on the next one (docs/adr/0063).

``transaction.py`` says what makes that safe. Here are the rules for it, and the one step that may wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from heterotrain.data.progress import Progress
from heterotrain.errors import PeerLost, UsageError
from heterotrain.exchange.gate import Gate
from heterotrain.state.script_settings import ScriptSettings
from heterotrain.steps.finite_gradient import read_gate
from heterotrain.steps.states import StepState, Transaction, after_gate
from heterotrain.steps.step_passes import StepPasses

_log = logging.getLogger(__name__)

_CHANGED = (
    "after step %d, the script has changed %s itself. A step that waits could not be repeated then, so all are "
    'confirmed in step.apply from now on, as with job.steps(..., confirm="now")'
)


class Haste(NamedTuple):
    """What of a step has to be confirmed at once, although its update is queued: the same on all ranks.

    So all ranks repeat a step whose gate was closed by a value, or all look at its gradient. A rank that wants to know
    earlier than the others, to write a checkpoint, say, reads the gate earlier, and nothing else changes.

    Attributes:
        divided: ranks hold different parts of the model, and confirm the sums together.
        on_the_host: the sums of some rank are not queued on its device.
        first_of_formation: its ranks do not know yet how they get on with each other.
        repeated: the gate was closed when this step was queued before.
        changed: the script has changed the gradient, so the gate does not speak for it.
        measured: the state is looked at while no later step changes buffers.
        scaled: the factor on the loss of the next step follows from this one.
        streamed: how far the data set is read is sent from rank to rank.
        last: it ends an epoch, a phase or the training.
        hooks: hooks are due.
        agreed: ranks have agreed on a checkpoint, a leave or the end.
        ordered: the order of buckets is to be agreed on.
        planned: a newer plan waits.
        apart: copies of the state differ, and one is sent to all.
        registered: the script has objects of its own, and changes them after ``step.apply``.
    """

    divided: bool = False
    on_the_host: bool = False
    first_of_formation: bool = False
    repeated: bool = False
    changed: bool = False
    measured: bool = False
    scaled: bool = False
    streamed: bool = False
    last: bool = False
    hooks: bool = False
    agreed: bool = False
    ordered: bool = False
    planned: bool = False
    apart: bool = False
    registered: bool = False


class Queued(NamedTuple):
    """A step whose update is queued.

    Attributes:
        step: the step.
        gate: the update is behind it.
        progress: of the training after the step.
        record: records it as committed.
        settings: of model and optimizers, as the step has used them.
        is_scheduled: whether learning rates follow when it is committed.
    """

    step: StepPasses
    gate: Gate
    progress: Progress
    record: Callable[[], None]
    settings: ScriptSettings
    is_scheduled: bool

    @property
    def changed(self) -> str:
        """Why the step cannot be repeated: the script has changed parameters since; empty if it can."""
        if not (names := self.settings.changed()):
            return ""
        return (
            f"step {self.step.task.number} has to be repeated, and the script has changed {_shown(names)} since its "
            'step.apply: train with job.steps(..., confirm="now")'
        )


class LateSteps:
    """The step that is not confirmed yet; there is one at most.

    Attributes:
        is_wanted: whether steps may wait.
        queued: that step; ``None`` if there is none.
        dropped: a queued step that has not happened, until the loop has gone back to before it.
        repeated: number of the newest one of them; -1 before.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.queued: Queued | None = None
        self.dropped: Queued | None = None
        self.repeated = -1
        self._following: tuple[int, ScriptSettings, ScriptSettings] | None = None

    def confirm(self) -> bool:
        """Read the gate of the step that waits, if there is one, and commit the step if the gate was open.

        Returns:
            Whether no step waits any more. Otherwise its gradient is not finite, and the step is to be repeated.

        Raises:
            PeerLost: the formation is cut, and the gate was closed.
        """
        if self.queued is None:
            return True
        passed = read_gate(self.queued.gate, self.queued.step.group)
        return self._enter(after_gate(was_open=passed.was_open, is_cut=False))

    def is_confirmed(self) -> bool:
        """Return whether no step waits, after ``confirm``; a loss is left to the loop, which meets it again."""
        with contextlib.suppress(PeerLost):
            return self.confirm()
        return False

    def end(self, lost: PeerLost) -> None:
        """Commit or drop the step that waits, because of a loss: the cut lets the device get past the gate."""
        if self.queued is not None:
            if (group := self.queued.step.group) is not None:
                group.cut(str(lost))
            self._enter(after_gate(was_open=self.queued.gate.read().was_open, is_cut=True))

    def drop(self) -> None:
        """Drop the step that waits: all ranks have voted against the one that follows it."""
        self._enter(StepState.REPEAT)

    def leave(self) -> Queued | None:
        """Commit the step that waits, or drop it and return it: this rank goes on no more."""
        with contextlib.suppress(UsageError):  # it is committed, without what the script has changed since
            if not self.is_confirmed():
                self.drop()
        return self.take_dropped()

    def take_dropped(self) -> Queued | None:
        """Return the step that the loop has to go back to, once, with its settings; ``None`` if there is none."""
        dropped, self.dropped = self.dropped, None
        if dropped is not None:
            before = dropped.settings
            self._following = dropped.step.task.number + 1, before.restore(), before
        return dropped

    def begin(self, number: int) -> None:
        """Begin a step; after one that was repeated, with what the script had set by then.

        A script may thaw layers once, or in each attempt at a step: both find them thawed, as in any repeated step.
        """
        if self._following is not None and number >= self._following[0]:
            (follows, settings, before), self._following = self._following, None
            if number == follows:
                settings.resume(before)

    def _enter(self, state: StepState) -> bool:
        queued = self.queued
        if queued is None or state is StepState.QUEUED:
            return queued is None
        self.queued, queued.step.transaction = None, Transaction(state)
        is_late = queued.is_scheduled and queued.settings.drop_changes_of_groups()
        if state is StepState.COMMITTED:
            self._look(queued)
            queued.record()
        else:
            self.dropped, self.repeated = queued, queued.step.task.number
        if is_late:
            raise UsageError(
                f"the script has changed the optimizer's groups or numbers while step {queued.step.task.number} waits, "
                "and schedulers change them when that is confirmed: look at step.committed at the end of the step "
                'before, or train with job.steps(..., confirm="now")'
            )
        return True

    def _look(self, queued: Queued) -> None:
        """Let no more steps wait in a script that changes parameters itself: a repeated step would do so twice."""
        if self.is_wanted and (names := queued.settings.changed()):
            self.is_wanted = False
            _log.warning(_CHANGED, queued.step.task.number, _shown(names))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
