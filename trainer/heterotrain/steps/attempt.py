"""The starting point of a repeated step: the model's earlier buffers, and micro-batches that fit in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from heterotrain_core.contract import metrics as names

from heterotrain.errors import OutOfMemory
from heterotrain.forward_state.state import ForwardState
from heterotrain.state.buffer_copies import BufferCopies
from heterotrain.state.layers import Layers
from heterotrain.state.script_settings import ScriptSettings
from heterotrain.state.weight_copies import WeightCopies
from heterotrain.steps.task import Task
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)


class Attempts:
    """Restores the state that an attempt changes besides gradients; limits micro-batches after running out of memory.

    Attributes:
        cap_samples: the largest micro-batch to try; ``None`` while the script has set none and memory has sufficed.
        weights: copies for a step that changes weights before its end.
    """

    def __init__(self, report: RankMetrics, forward_state: ForwardState, *, cap_samples: int | None = None) -> None:
        self.cap_samples = cap_samples
        self._report = report
        self._tell_cap()
        self._forward_state = forward_state
        self._copies, self._older = forward_state.copies, BufferCopies()
        self._behind: object = None
        self.weights = WeightCopies()
        self._model: torch.nn.Module | None = None
        self._layers: Layers | None = None

    def begin(self, model: torch.nn.Module | None, behind: object = None) -> None:
        """Copy buffers and frozen parameters that may change, so that a repeated step starts from the same values.

        Args:
            model: the model.
            behind: the step before, while it is queued: the values from before it are kept, too.
        """
        if behind is not None and behind is not self._behind:
            self._older.swap(self._copies)
            self._behind = behind
        self.weights.drop()
        if model is not self._model:
            self._model = model
            self._layers = None if model is None else Layers(model)
        if self._layers is not None:
            buffers, state = self._layers.buffers(), self._forward_state
            if buffers or state.is_active:
                self._copies.renew(chain(buffers, state.frozen()) if state.is_active else buffers)

    def keep_weights(self) -> None:
        """Keep the weights, which the script may change before the step ends."""
        if self._model is not None:
            self.weights.keep_weights(self._model)

    def settings(self, optimizers: Sequence[torch.optim.Optimizer]) -> ScriptSettings:
        """Note the settings of model and optimizers, which the script may change while a step waits."""
        layers = self._layers or Layers(torch.nn.Module())
        return ScriptSettings(layers, optimizers, self._forward_state.frozen)

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The model's buffers and frozen parameters that may change, before the current attempt, by name."""
        return self._copies.values

    def undo(self, queued: object = None) -> None:
        """Restore the buffers, and weights and optimizer states that the attempt has changed.

        With a step that was ``queued`` and did not happen, restore the values from before that one.
        """
        self.weights.restore()
        if self._layers is not None:
            copies = self._copies if queued is None or queued is not self._behind else self._older
            copies.restore(chain(self._layers.buffers(), self._forward_state.frozen()))

    def use_less_memory(self, task: Task, failure: Exception, spare: Callable[[], bool]) -> None:
        """Halve the largest micro-batch after an out-of-memory error; where it is one sample, keep no activations.

        Args:
            task: of the step that ran out of memory.
            failure: the error.
            spare: lets the model compute activations again; returns ``False`` if it cannot, or does so already.

        Raises:
            OutOfMemory: not even a single sample fits.
        """
        largest = max(task.micro_batches, default=1)
        if largest > 1:
            self.cap_samples = largest // 2
            self._tell_cap()
            _log.warning(
                "out of memory with micro-batches of %d samples: using %d from now on", largest, self.cap_samples
            )
        elif spare():
            self._report.gauges({names.CHECKPOINTED_UNITS: 1.0})
            _log.warning("out of memory with a single sample: activations of units are computed again from now on")
        else:
            raise OutOfMemory(
                "a single sample does not fit into memory. Use a smaller model or smaller samples, checkpoint "
                "activations (job.wrap(…, units=…, checkpoint_units=True)) unless that is done already, or leave out "
                "pools whose accelerators have too little memory."
            ) from failure
        self._report.count(names.OUT_OF_MEMORY)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _tell_cap(self) -> None:
        """Export the limit: the operator's split counts the micro-batches that a share needs."""
        if self.cap_samples is not None:
            self._report.gauges({names.MICRO_BATCH_CAP: float(self.cap_samples)})
