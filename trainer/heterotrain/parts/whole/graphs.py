"""Forward and backward passes of a whole model as CUDA graphs, one pair for each form of the inputs (docs/adr/0064).

A small model's step takes as long as the host needs to start its kernels. A graph starts all of a pass at once.
Gradients leave a graph together, so a small first bucket does not travel while the rest is computed.

A form is recorded when it comes for the second time: the last step of an epoch often has one of its own. Whatever a
recording depends on is part of the form: shapes, strides and formats of the inputs, arguments that are not tensors, the
precision, the addresses of parameters and buffers, what is trained, and each layer's mode. So nothing has to be dropped
when a plan, a formation or the script changes one of them.

Everything else that happens in the model in Python happens in a recording only. What can be found, such as random
numbers of the host, hooks of layers or gradients of tensors that are not the model's, lets the passes run eagerly.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.numerics.batch_norm import GlobalBatchNorm
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.parts.units.wrappers import IS_COMPILED
from heterotrain.parts.whole.recorded_passes import (
    CONSTANTS,
    PlacedPasses,
    UnfitPass,
    is_tensor,
    looked_at,
    record,
    tensors_in,
    unchanged,
)
from heterotrain.parts.whole.recording import Recorder, Recording
from heterotrain.state.layers import Layers

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MOST_FORMS = 8
"""Recordings that are kept. A rank has few sizes of micro-batches: two in a share, one more at the end of an epoch."""
IDLE_CALLS = 256
"""Forward passes for which the oldest recording must not have been used before a new one takes its place: plans change
shares, and a recording takes the time of some ten passes."""
MOST_SEEN = 64
"""Forms that are remembered without a recording."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Forms(Generic[_T]):
    """Recordings by form, a bounded number of them."""

    def __init__(self) -> None:
        self._calls = 0
        self._kept: dict[Hashable, tuple[_T, list[int]]] = {}
        self._seen: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self._kept)

    def find(self, form: Hashable) -> _T | None:
        """Count a call, and return the recording of its form."""
        self._calls += 1
        kept = self._kept.get(form)
        if kept is None:
            return None
        kept[1][0] = self._calls
        return kept[0]

    def is_due(self, form: Hashable) -> bool:
        """Return whether to record a form that has no recording: the second time, if there is room for it."""
        count = self._seen.pop(form, 0)
        self._seen[form] = count + (count >= 0)
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        if count < 1:
            return False
        if len(self._kept) < MOST_FORMS:
            return True
        oldest = min(self._kept, key=lambda each: self._kept[each][1][0])
        if self._calls - self._kept[oldest][1][0] <= IDLE_CALLS:
            return False
        del self._kept[oldest]
        return True

    def keep(self, form: Hashable, recording: _T) -> None:
        """Keep a recording."""
        self._seen.pop(form, None)
        self._kept[form] = (recording, [self._calls])

    def refuse(self, form: Hashable) -> None:
        """Record this form no more."""
        self._seen[form] = -1

    def clear(self) -> None:
        """Drop all recordings."""
        self._kept.clear()


class GraphedForward:
    """In place of a model's ``forward``: runs recordings where gradients are computed, and else what was there before.

    Attributes:
        group: of the formation; its counter shows whether a forward pass exchanges data with other ranks.
    """

    def __init__(self, model: torch.nn.Module, recorder: Recorder) -> None:
        """Record the passes of a model from now on.

        Raises:
            UsageError: it cannot be recorded, see ``check_recordable``.
        """
        check_recordable(model)
        self.group: Group | None = None
        self._model, self._recorder = model, recorder
        self._own = vars(model).get("forward")
        self._layers, self._device = Layers(model), next(model.parameters()).device
        self._forms: Forms[Recording] = Forms()
        self._told: set[str] = set()
        self._is_off = False
        functools.update_wrapper(self, model.forward)
        model.forward = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model, and models from files, run without recordings."""
        return _forward_of, (self._model, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns.

        Raises:
            UsageError: an operation of the model cannot be recorded.
        """
        if self._is_off or not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        form = self._form(leaves, spec)
        if form is None:
            return self._eager(*args, **kwargs)
        recording = self._forms.find(form)
        if recording is None and self._forms.is_due(form):
            recording = self._made(form, leaves, spec)
        if recording is None:
            before = self._exchanges
            result = self._eager(*args, **kwargs)
            if self._exchanges != before:
                self._forms.refuse(form)
                self._tell("its forward pass exchanges data with other ranks")
            return result
        if recording.is_pending:  # its activations are still needed
            return self._eager(*args, **kwargs)
        return recording.run(tensors_in(leaves))

    def drop(self) -> None:
        """Drop all recordings and their memory; forms that come again are recorded again."""
        self._forms.clear()

    def stop(self) -> None:
        """Run eagerly from now on."""
        self._is_off = True
        self.drop()

    # -- internals ---------------------------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> int:
        return 0 if self.group is None else self.group.script.started

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return _forward_of(self._model, self._own)(*args, **kwargs)

    def _form(self, leaves: Sequence[Any], spec: TreeSpec) -> Hashable | None:
        """Return all on which a recording depends; ``None`` where there is none for these arguments."""
        parts: list[Hashable] = []
        for leaf in leaves:
            if type(leaf) in _PLAIN and leaf.layout is torch.strided and leaf.device == self._device:
                parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            elif isinstance(leaf, CONSTANTS):
                parts.append((type(leaf), leaf))
            else:
                return None
        kind = self._device.type
        precision = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return spec, tuple(parts), precision, self._layers.state()

    def _made(self, form: Hashable, leaves: Sequence[Any], spec: TreeSpec) -> Recording | None:
        """Record a form; return ``None`` where that is not possible, so that it runs eagerly from now on.

        Raises:
            UsageError: as ``check_recordable``, or an operation of the model cannot be recorded.
        """
        check_recordable(self._model)
        try:
            with unchanged(self._model, self._device):
                recording = self._recorded(leaves, spec)
        except UnfitPass as unfit:
            self._forms.refuse(form)
            self._tell(str(unfit))
            return None
        except RuntimeError as error:
            if out_of_memory(error) is None:
                raise
            self._forms.refuse(form)
        else:
            self._forms.keep(form, recording)
            shapes = ", ".join(str(tuple(each.shape)) for each in recording.inputs)
            _log.info("recorded the passes for inputs of %s, %d of at most %d", shapes, len(self._forms), MOST_FORMS)
            return recording
        self.drop()  # after the error, whose traceback holds the activations
        self._tell("memory does not suffice for a recording")
        return None

    def _recorded(self, leaves: Sequence[Any], spec: TreeSpec) -> Recording:
        """Look at the passes once, and record them.

        Raises:
            UnfitPass: they do what a recording would not repeat.
            UsageError: an operation cannot be recorded.
        """
        passes = PlacedPasses(self._model, self._eager, leaves, spec)
        if not passes.parameters:
            raise UnfitPass("no parameter of the model is trained")
        found, result_spec = tree_flatten(looked_at(self._model, self._device.type, passes))
        if not all(is_tensor(leaf) or isinstance(leaf, CONSTANTS) for leaf in found):
            raise UnfitPass("its result has other values than tensors, numbers and texts")
        if not any(each.requires_grad for each in tensors_in(found)):
            raise UnfitPass("its result does not depend on its parameters")
        recording = record(passes, found, result_spec, self._recorder)
        recording.kept = [tensor.detach() for tensor in (*self._model.parameters(), *self._model.buffers())]
        return recording

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("job.wrap(graphs=True): passes run without graphs, because %s", reason)


def check_recordable(model: torch.nn.Module) -> None:
    """Refuse a model whose passes cannot be recorded as a whole.

    Raises:
        UsageError: it exchanges statistics, is compiled, or is not called itself.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, GlobalBatchNorm):
            raise UsageError(
                f"job.wrap: graphs=True is not possible for layer {name!r}, which takes its statistics over all ranks "
                "in the forward pass: use init(batch_norm='local'), GroupNorm or LayerNorm"
            )
        own = "_orig_mod" in layer._modules or layer._compiled_call_impl is not None  # noqa: SLF001  # torch has no public way
        if own or getattr(layer, IS_COMPILED, False):
            raise UsageError(
                "job.wrap: graphs=True is not possible for a model that torch.compile has compiled: leave it out, and "
                "use torch.compile(…, mode='reduce-overhead'), which makes graphs itself"
            )
    if type(model).forward is torch.nn.Module.forward:
        raise UsageError(
            "job.wrap: graphs=True records calls of the model, and this one has no forward(): give it one that calls "
            "its parts, or leave out graphs=True"
        )


def _forward_of(model: torch.nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a model's forward pass: its own attribute, or that of its class."""
    return types.MethodType(type(model).forward, model) if own is None else own
