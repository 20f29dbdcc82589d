"""Snapshots of what a hook of the script may change: a hook that was interrupted is called again from there.

Weights are only looked at, not copied, because a hook rarely changes them, and a copy would double the memory for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from heterotrain.errors import UsageError
from heterotrain.state.buffer_copies import BufferCopies
from heterotrain.state.local import local
from heterotrain.state.training import BeforeHooks, TrainState


class Snapshot(BeforeHooks):
    """The state of registered objects, the optimizers' settings, the model's layers and buffers at one time."""

    def __init__(self, training: TrainState) -> None:
        """Copy the present state; tensors of registered objects go to host memory."""
        self._training = training
        model = training.model or torch.nn.Module()
        self._extras = {
            name: _copied(extra.state_dict())
            for name, extra in training.extras.items()
            if not name.startswith("heterotrain-")  # the library's own, which hooks do not change
        }
        self._groups = [[dict(group) for group in optimizer.param_groups] for optimizer in training.optimizers]
        for groups in self._groups:
            for group in groups:
                group["params"] = list(group["params"])
        self._contents: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (contents, dict(contents))
            for layer in model.modules()
            for contents in (layer._modules, layer._parameters, layer._buffers)  # noqa: SLF001  # as state.layers does
        ]
        self._flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._buffers = BufferCopies()
        self._buffers.renew(model.named_buffers())
        self._weights = _checksums(training)

    def is_possible(self) -> bool:
        """Return whether the weights are those of that time."""
        return _checksums(self._training) == self._weights

    def restore(self) -> None:
        """Restore everything but the weights.

        Raises:
            UsageError: the weights have changed.
        """
        for contents, before in self._contents:
            contents.clear()
            contents.update(before)
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        for optimizer, groups in zip(self._training.optimizers, self._groups, strict=True):
            del optimizer.param_groups[len(groups) :]
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
        for name, saved in self._extras.items():
            self._training.extras[name].load_state_dict(saved)
        if self._training.model is not None:
            self._buffers.restore(self._training.model.named_buffers())
        if not self.is_possible():
            raise UsageError(
                "a hook had other weights in the model when the loss of a worker interrupted it, so it cannot be "
                "called again: put the model's own weights back in a `finally:` block, or change them outside of hooks"
            )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple([_copied(item) for item in value])
    return value


def _checksums(training: TrainState) -> list[int]:
    """Return a checksum of each parameter that this rank holds, computed on its device."""
    if training.model is None:
        return []
    parts = (local(parameter) for _, parameter in training.layout.named_parameters())
    return [int(torch.hash_tensor(part).view(torch.int64)) for part in parts if part.numel()]
