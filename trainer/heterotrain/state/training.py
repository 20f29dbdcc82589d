"""The training state: model, optimizers, other objects registered by the script, and the progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from heterotrain.data.order import UNSHUFFLED
from heterotrain.data.progress import Progress
from heterotrain.errors import UsageError
from heterotrain.layouts.layout import Layout, WholeModel
from heterotrain.state import groups
from heterotrain.state.parts import sizes_bytes
from heterotrain.state.prepared import Confirmation, PreparedStep
from heterotrain.state.tensors import Flat, Stateful, flatten, unflatten

_log = logging.getLogger(__name__)

MAX_NAMES_SHOWN = 3
"""Parameters listed in a message at most."""
SAME_SCRIPT = "run the same script on every worker and in every resumed run, or start with another checkpoint folder"


@dataclass(slots=True)
class Training:
    """The replicated state; equal on all ranks between steps.

    Attributes:
        on_restore: called with the number of epochs whose hooks have run, before a state is restored.
        order: name of the order in which this script reads its data; empty before ``job.steps``.
        prepared: a step of a divided model that this rank can finish, but does not know whether the others can.
        confirmed: number and confirmation of the last step of a divided model that this rank has applied.
        has_state: whether ``progress`` and the tensors are valid; a joiner has no state until a donor has sent it.
    """

    model: torch.nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    extras: dict[str, Stateful] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    order: str = ""
    has_state: bool = False
    on_restore: list[Callable[[int], object]] = field(default_factory=list)
    own_layout: Layout | None = None
    prepared: PreparedStep | None = None
    confirmed: tuple[int, Confirmation] | None = None

    @property
    def layout(self) -> Layout:
        """What this rank holds of the model."""
        return self.own_layout or WholeModel(self._model())

    def capture(self, buffers: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return everything that a joiner or a checkpoint needs; the tensors are the live ones, not copies.

        ``buffers`` replace the model's own when a running step may have changed those.
        """
        model = self._model().state_dict()
        parameters = list(self._model().named_parameters())
        names = {id(parameter): name for name, parameter in parameters}
        return {
            "progress": asdict(self.progress),
            "order": self.order,
            "model": model | {name: buffer for name, buffer in (buffers or {}).items() if name in model},
            "trained": [name for name, parameter in parameters if parameter.requires_grad],
            "optimizers": [groups.capture(optimizer, names) for optimizer in self.optimizers],
            "kinds": [type(optimizer).__name__ for optimizer in self.optimizers],
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def size_bytes(self) -> int:
        """Return the total size of all tensors."""
        return sum(sizes_bytes(self.flat().tensors))

    def flat(self) -> Flat:
        """Return the state as skeleton and tensors."""
        return flatten(self.capture())

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a captured state.

        Raises:
            UsageError: it belongs to another model or script, or to an epoch in another order.
        """
        self._check_order(state)
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        if state.get("kinds", kinds) != kinds:
            raise UsageError(
                f"the state to continue from has {' and '.join(state['kinds'])}, and this script has "
                f"{' and '.join(kinds)}: {SAME_SCRIPT}"
            )
        if set(state["extras"]) != set(self.extras):
            differing = sorted(set(state["extras"]) ^ set(self.extras))
            raise UsageError(
                f"the state to continue from and this script differ in schedulers or registered objects "
                f"({', '.join(differing)}): {SAME_SCRIPT}"
            )
        for hook in self.on_restore:
            hook(state["progress"]["evaluated"])
        try:
            self._model().load_state_dict(state["model"])
        except RuntimeError as error:
            why = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines()[1:4])
            raise UsageError(f"the state to continue from belongs to another model ({why}): {SAME_SCRIPT}") from error
        if "trained" in state:  # older checkpoints do not say
            self._freeze(frozenset(state["trained"]))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            try:
                groups.restore(optimizer, saved, self._model())
            except ValueError as error:
                raise UsageError(
                    f"the state to continue from groups parameters of {type(optimizer).__name__} differently "
                    f"({error}): {SAME_SCRIPT}"
                ) from error
        for name, saved in state["extras"].items():
            self.extras[name].load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self.has_state = True

    def restore_flat(self, flat: Flat) -> None:
        """Restore a transferred state."""
        self.restore(unflatten(flat))

    def _freeze(self, trained: frozenset[str]) -> None:
        """Freeze and thaw parameters, so that the same ones are trained as on the rank that the state comes from."""
        changed = []
        for name, parameter in self._model().named_parameters():
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)
                changed.append(name)
        if changed:
            shown = ", ".join(changed[:MAX_NAMES_SHOWN]) + (", …" if changed[MAX_NAMES_SHOWN:] else "")
            _log.info("frozen or thawed as in the state to continue from: %s", shown)

    def _check_order(self, state: dict[str, Any]) -> None:
        """Refuse to go on in the middle of an epoch in another order, which would lose and repeat samples."""
        # Earlier versions drew orders with numpy and did not name them.
        saved = state.get("order", UNSHUFFLED if self.order == UNSHUFFLED else "drawn by numpy")
        if state["progress"]["cursor"] == 0 or "" in (saved, self.order) or saved == self.order:
            return
        raise UsageError(
            f"the state to continue from is in the middle of an epoch whose order of samples is {saved!r}, and here it "
            f"is {self.order!r}, so samples would be lost and repeated: continue with the version, seed and shuffle= "
            "that training began with, or start with another checkpoint folder"
        )

    def _model(self) -> torch.nn.Module:
        if self.model is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.model
