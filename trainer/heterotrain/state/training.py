"""The training state: model, optimizers, other objects registered by the script, and the progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from heterotrain.data.progress import Progress
from heterotrain.errors import UsageError
from heterotrain.state import groups
from heterotrain.state.layout import ModelLayout, WholeModel, is_whole, sizes_of
from heterotrain.state.memory import sizes_bytes
from heterotrain.state.prepared import Confirmation, PreparedStep
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.tensors import Flat, Stateful, TensorShard, elements_in, flatten, unflatten, unpacked

_log = logging.getLogger(__name__)

MAX_NAMES_SHOWN = 3
"""Parameters listed in a message at most."""
_KEYS = ("progress", "order", "stream", "shapes", "model", "trained", "optimizers", "kinds", "extras")
"""Of a captured state."""
SAME_SCRIPT = "run the same script on every worker and in every resumed run, or start with another checkpoint folder"


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a rank holds of the state between two layouts, while parts of it are sent and received.

    Attributes:
        flat: the state; its tensors are those of the earlier part of the model, or were received since.
        holding: its parameters and buffers; ``None`` for all of the model's.
    """

    flat: Flat
    holding: Holding | None


class BeforeHooks:
    """What was there before hooks that have changed nothing; ``state.snapshot`` has the other kind."""

    def is_possible(self) -> bool:
        """Return whether all of it can come back: the weights are those of that time."""
        return True

    def restore(self) -> None:
        """Restore everything but the weights."""


@dataclass(slots=True)
class TrainState:
    """The state; between steps, equal on all ranks wherever two of them hold the same.

    Attributes:
        own_layout: what this rank holds of the model; ``None`` for all of it.
        holdings: what each rank of the formation holds; empty where all of them hold everything.
        earlier: the state as this rank holds it until all of its part under a new layout has arrived.
        on_restore: called with the number of epochs whose hooks have run, before a state is restored.
        order: name of the order in which this script reads its data; empty before ``job.steps``.
        stream: where a data set that can only be iterated can be read from, encoded; empty where nothing is known.
        prepared: a step of a divided model that this rank can finish, but does not know whether the others can.
        confirmed: number and confirmation of the last step of a divided model that this rank has applied.
        before_hooks: the progress before the newest hooks, and what they may have changed, in a divided model until the
            next step is committed.
        has_own: whether the script has registered objects of its own, which the body of its loop may change.
        joined: committed steps when this rank took the state over from running ranks; -1 if it did not.
        has_state: whether ``progress`` and the tensors are valid; a joiner has no state until a donor has sent it.
    """

    model: torch.nn.Module | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    extras: dict[str, Stateful] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    order: str = ""
    stream: bytes = b""
    has_state: bool = False
    on_restore: list[Callable[[int], object]] = field(default_factory=list)
    own_layout: ModelLayout | None = None
    prepared: PreparedStep | None = None
    confirmed: tuple[int, Confirmation] | None = None
    holdings: tuple[Holding | None, ...] = ()
    earlier: HeldState | None = None
    before_hooks: tuple[Progress, BeforeHooks] | None = None
    has_own: bool = False
    joined: int = -1
    _begin: Callable[[], None] = lambda: None
    _is_past: Callable[[Progress], bool] = lambda _progress: False

    @property
    def layout(self) -> ModelLayout:
        """What this rank holds of the model."""
        return self.own_layout or WholeModel(self._model())

    @property
    def needs(self) -> Holding | None:
        """What this rank's model consists of: parameters and buffers; ``None`` for everything."""
        return None if self.own_layout is None else holding_of(self.own_layout)

    @property
    def has(self) -> Holding | None:
        """What this rank holds of its present state; that of an earlier layout, before the first transfer."""
        return self.needs if self.earlier is None else self.earlier.holding

    def change_layout(
        self, model: torch.nn.Module, layout: ModelLayout | None, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Train another part of the model from the next transfer on, which brings what this rank lacks.

        Until then the tensors of the earlier part and its optimizers stay in memory as this rank's state. The caller
        makes optimizers of the new part and assigns them to ``optimizers`` after this call.

        Args:
            model: the new part.
            layout: what it is of the whole model; ``None`` for the whole one.
            begin: gives it its initial values, where it was made without any.
        """
        if self.has_state and self.earlier is None:
            self.earlier = HeldState(self.flat(), self.needs)
        self.model, self.own_layout, self._begin = model, layout, begin

    def begin(self) -> None:
        """Give the model its initial values, where it was made without any."""
        self._begin()

    def repeat_hooks(self) -> None:
        """Go back to before the newest hooks."""
        if self.before_hooks is not None:
            self.progress, before = self.before_hooks
            before.restore()
            self.before_hooks = None

    def enter_phase(self, is_past: Callable[[Progress], bool]) -> None:
        """Train a loop of the script, which has nothing left to train at positions that are past.

        A state that comes in such a position is kept as it is, until ``settle`` in the loop of its phase.
        """
        self._is_past = is_past

    def hold(self, flat: Flat) -> None:
        """Take a part of the newest state for this rank's, while a transfer is under way.

        If the transfer breaks, others may have nothing of it any more.
        """
        if self.earlier is None or self.earlier.flat.skeleton is not flat.skeleton:  # the first part
            self.progress = Progress(**unpacked(flat.skeleton)["progress"])
        self.has_state, self.earlier = True, HeldState(flat, holding_in(flat))

    def capture(self, buffers: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return everything that a joiner or a checkpoint needs; the tensors are the live ones, not copies.

        ``buffers`` replace the model's own when a running step may have changed those.
        """
        if self.earlier is not None:
            return unflatten(self.earlier.flat)
        layout, optimizers = self.layout, self.optimizers
        holding, shapes = layout.holding, layout.shapes
        parameters, sizes = dict(layout.named_parameters()), sizes_of(shapes)

        def part(name: str, tensor: torch.Tensor) -> torch.Tensor | TensorShard | None:
            if sizes[name] and not holding[name].elements:
                return None
            if tensor.shape != parameters[name].shape:
                return tensor
            if holding[name].elements == sizes[name]:
                return layout.local(tensor).view(shapes[name])
            return TensorShard(layout.local(tensor).reshape(-1), shapes[name], holding[name])

        model = {
            name: own
            for name, (value, first) in _model_state(layout).items()
            if (own := value if first is None else part(first, value)) is not None
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        return {
            "progress": asdict(self.progress),
            "order": self.order,
            "stream": self.stream,
            "shapes": dict(shapes),
            "model": model | {name: buffer for name, buffer in (buffers or {}).items() if name in model},
            "trained": [name for name, parameter in parameters.items() if parameter.requires_grad],
            "optimizers": [groups.capture(optimizer, names, part) for optimizer in optimizers],
            "kinds": [type(optimizer).__name__ for optimizer in optimizers],
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
        }

    def size_bytes(self) -> int:
        """Return the size of all tensors, as far as this rank holds them."""
        return sum(sizes_bytes(self.flat().tensors))

    def flat(self) -> Flat:
        """Return the state as skeleton and tensors."""
        return flatten(self.capture()) if self.earlier is None else self.earlier.flat

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a captured state.

        Raises:
            UsageError: it belongs to another model or script, to an epoch in another order, or to an older version.
        """
        if lacking := [key for key in _KEYS if key not in state]:
            raise UsageError(
                f"the state to continue from lacks {', '.join(lacking)}, because an older version wrote it: continue "
                "with that version, or start with another checkpoint folder"
            )
        progress = Progress(**state["progress"])
        if self._is_past(progress):
            self.earlier, self.progress, self.has_state = HeldState(flatten(state), None), progress, True
            return
        self._check_order(state)
        if self.own_layout is None:
            whole = self.layout
            state = groups.named_as(state, [name for name, _ in whole.named_parameters()], whole.state_dict())
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        if state["kinds"] != kinds:
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
        model = state["model"] if self.own_layout is None else _own_model(self.own_layout, state["model"])
        try:
            self.layout.load_state_dict(model)
        except RuntimeError as error:
            why = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines()[1:4])
            raise UsageError(f"the state to continue from belongs to another model ({why}): {SAME_SCRIPT}") from error
        self._freeze(frozenset(state["trained"]))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            try:
                groups.restore(optimizer, saved, self.layout)
            except ValueError as error:
                raise UsageError(
                    f"the state to continue from groups parameters of {type(optimizer).__name__} differently "
                    f"({error}): {SAME_SCRIPT}"
                ) from error
        for name, saved in state["extras"].items():
            self.extras[name].load_state_dict(saved)
        self.progress = progress
        self.stream = state["stream"]
        self.has_state, self.earlier = True, None

    def restore_flat(self, flat: Flat) -> None:
        """Restore a transferred state."""
        self.restore(unflatten(flat))

    def settle(self) -> None:
        """Restore a state that came in an earlier phase of the script, now that this is the loop of its phase."""
        if self.earlier is not None:
            flat, stopped = self.earlier.flat, self.progress.stopped
            self.earlier, self._is_past = None, lambda _progress: False
            self.restore_flat(flat)
            self.progress = replace(self.progress, stopped=stopped)

    def _freeze(self, trained: frozenset[str]) -> None:
        """Freeze and thaw parameters, so that the same ones are trained as on the rank that the state comes from."""
        changed = []
        for name, parameter in self.layout.named_parameters():
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)
                changed.append(name)
        if changed:
            shown = ", ".join(changed[:MAX_NAMES_SHOWN]) + (", …" if changed[MAX_NAMES_SHOWN:] else "")
            _log.info("frozen or thawed as in the state to continue from: %s", shown)

    def _check_order(self, state: dict[str, Any]) -> None:
        """Refuse to go on in the middle of an epoch in another order, which would lose and repeat samples."""
        saved = state["order"]
        if state["progress"]["cursor"] == 0 or "" in (saved, self.order) or saved == self.order:
            return
        raise UsageError(
            f"the state to continue from is in the middle of an epoch whose order of samples is {saved!r}, and here it "
            f"is {self.order!r}, so samples would be lost and repeated: continue with the version, data, seed and "
            "shuffle= that training began with, or start with another checkpoint folder"
        )

    def _model(self) -> torch.nn.Module:
        if self.model is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.model


def holding_in(flat: Flat) -> Holding:
    """Return which parameters and buffers a state has."""
    own = (held for held in flat.held if held.entry.name.startswith("model."))
    return {held.entry.of: replace(held.own, name=held.entry.of) for held in own}


def holding_of(layout: ModelLayout) -> Holding | None:
    """Return what a rank holds of parameters and buffers; ``None`` for everything."""
    if is_whole(layout.shapes, layout.holding):
        return None
    buffers = {
        name: TensorRange(name, 0, value.numel())
        for name, (value, first) in _model_state(layout).items()
        if isinstance(value, torch.Tensor) and first is None
    }
    return dict(layout.holding) | buffers


def _own_model(layout: ModelLayout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank holds of a model's state: divided parameters flat, others as they are."""
    holding, sizes, found = layout.holding, sizes_of(layout.shapes), {}
    for name, (_, first) in _model_state(layout).items():
        if name not in state:
            continue
        value = found[name] = state[name]
        if first is not None and holding[first].elements != sizes[first]:
            found[name] = elements_in(value, holding[first])
        elif isinstance(value, TensorShard):
            found[name] = value.values.view(value.shape)
    return found


def _model_state(layout: ModelLayout) -> dict[str, tuple[Any, str | None]]:
    """Return the model's state, and for each parameter in it its first name: tied ones have several."""
    shapes, first_name = layout.shapes, {}
    for name, parameter in layout.named_parameters():
        local = layout.local(parameter)
        if local.numel():
            first_name[local.device, local.data_ptr(), tuple(parameter.shape)] = name
    found: dict[str, tuple[Any, str | None]] = {}
    for name, value in layout.state_dict().items():
        first = name if name in shapes else None
        if first is None and isinstance(value, torch.Tensor):
            local = layout.local(value)
            first = first_name.get((local.device, local.data_ptr(), tuple(value.shape)))
        found[name] = (value, first)
    return found
