"""What is trained: model, optimizers, whatever else the script registers, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from heterotrain.data.progress import Progress
from heterotrain.errors import UsageError
from heterotrain.state.parts import sizes_bytes
from heterotrain.state.tensors import Flat, Stateful, flatten, unflatten

SAME_SCRIPT = (
    "every worker and every resumed run has to run the same script, or begin with another folder for checkpoints"
)


@dataclass(slots=True)
class Training:
    """The replicated state; equal on all ranks between steps.

    Attributes:
        has_state: whether ``progress`` and the tensors mean anything yet: a joiner has none until a donor sent it.
    """

    model: torch.nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    extras: dict[str, Stateful] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    has_state: bool = False

    def capture(self, buffers: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return everything that a joiner or a checkpoint needs; the tensors are the live ones.

        ``buffers`` stand in for the model's own, where a step is under way and may have changed those.
        """
        model = self._model().state_dict()
        return {
            "progress": asdict(self.progress),
            "model": model | {name: buffer for name, buffer in (buffers or {}).items() if name in model},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def size_bytes(self) -> int:
        """Return how much there is to copy; all its tensors together."""
        return sum(sizes_bytes(self.flat().tensors))

    def flat(self) -> Flat:
        """Return the state taken apart."""
        return flatten(self.capture())

    def restore(self, state: dict[str, Any]) -> None:
        """Take a captured state over.

        Raises:
            UsageError: it belongs to another model or script.
        """
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        if state.get("kinds", kinds) != kinds:
            raise UsageError(
                f"the state to continue from is one of {' and '.join(state['kinds'])}, and this script has "
                f"{' and '.join(kinds)}: {SAME_SCRIPT}"
            )
        if set(state["extras"]) != set(self.extras):
            differing = sorted(set(state["extras"]) ^ set(self.extras))
            raise UsageError(
                f"the state to continue from and this script differ in schedulers or registered objects "
                f"({', '.join(differing)}): {SAME_SCRIPT}"
            )
        try:
            self._model().load_state_dict(state["model"])
        except RuntimeError as error:
            why = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines()[1:4])
            raise UsageError(f"the state to continue from belongs to another model ({why}): {SAME_SCRIPT}") from error
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            try:
                optimizer.load_state_dict(saved)
            except ValueError as error:
                raise UsageError(
                    f"the state to continue from groups parameters of {type(optimizer).__name__} in another way ({error}): "
                    f"{SAME_SCRIPT}"
                ) from error
        for name, saved in state["extras"].items():
            self.extras[name].load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.has_state = True

    def restore_flat(self, flat: Flat) -> None:
        """Take a transferred state over."""
        self.restore(unflatten(flat))

    def _model(self) -> torch.nn.Module:
        if self.model is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.model
