"""One stage of a pipeline member: contiguous units of the model, computed for all samples of the member's share.

The first stage reads the inputs, the last one inputs and targets, each by itself; tensors between units travel between
neighbours. Gradients are sums over the member's samples, as with whole models. A tied parameter is held by each stage
that uses it, and its gradient is the sum over them (``state.ranges.pieces_of``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.batches import LossFunction, OwnValuesOnly, inputs_and_targets, loss_and_weight
from heterotrain.parts.interface import PLAIN, Method, Result, Share
from heterotrain.parts.stages.neighbours import Neighbours
from heterotrain.parts.stages.schedule_1f1b import Pass, passes
from heterotrain.parts.stages.stage_model import StageModel
from heterotrain.parts.stages.trace import PassTrace
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues
from heterotrain.parts.units.units import Units, check_cut
from heterotrain.parts.units.wrappers import checkpoint_more
from heterotrain.state.layout import ModelLayout, Shapes, check_keys, sizes_of
from heterotrain.state.ranges import Holding, whole


@dataclass(slots=True)
class _InFlight:
    received: torch.Tensor | None
    output: torch.Tensor
    batch: Any = field(default=None)


class Stage(ModelLayout):
    """A stage, and the layout of its rank.

    Attributes:
        model: the whole model's object, with values for the stage's own layers only.
        seen: the model's trace.
    """

    def __init__(
        self,
        units: Units,
        seen: PassTrace,
        cuts: Sequence[int],
        group: MemberGroup,
        values: InitialValues,
    ) -> None:
        """Keep the stage's own units of a model on the meta device.

        Parameters get memory and initial values from ``begin``, or memory from the state that is loaded first, which
        they then share.

        Args:
            units: of the whole model; its object becomes this rank's part.
            seen: of the same model.
            cuts: first unit of each stage, and the number of units at the end.
            group: the member's ranks, in the order of stages, connected with gloo.
            values: initial ones, on this rank's device.

        Raises:
            UsageError: the model cannot be cut this way.
        """
        check_cut(units.names, cuts)
        if len(cuts) - 1 != group.size():
            raise UsageError(f"{len(cuts) - 1} stages need as many ranks, and the member has {group.size()}")
        self._stage, self._stages = group.rank(), group.size()
        self.model, self.seen = units.model, seen
        self._shapes = {name: tuple(p.shape) for name, p in units.model.named_parameters()}
        first = {id(p): name for name, p in units.model.named_parameters()}
        every = units.model.named_parameters(remove_duplicate=False)
        self._first_names = {name: first[id(p)] for name, p in every}
        self._tensors = set(units.model.state_dict())
        self._parts = tuple(
            p for p in units.parts if any(p in used for used in seen.parts[cuts[self._stage] : cuts[self._stage + 1]])
        )
        self._values, self._has_values = values, False
        values.fill(units, self._parts, with_parameters=False)
        self._part = StageModel(units, seen, start=cuts[self._stage], stop=cuts[self._stage + 1])
        self._draws = UnitDraws(self._part.units, seed=values.seed, device=values.device)
        self._neighbours = Neighbours(group, values.device)
        self._has_loss = False  # whether the loss function has been called: its first call is watched

    def checkpoint_units(self) -> None:
        """Compute activations of this stage's units again in the backward pass from now on."""
        units = self._part.units
        own = range(max(self._part.start, units.first_layer), self._part.stop)
        layers = (unit - units.first_layer for unit in own)
        checkpoint_more(units.layers[layer] for layer in layers if layer < len(units.layers))

    def begin(self, units: Units) -> None:
        """Give parameters their initial values, if they have none yet.

        Args:
            units: of another copy of the whole model, on the meta device, which gets values, too.
        """
        if self._has_values:
            return
        self._values.fill(units, self._parts)
        every = units.model.named_parameters(remove_duplicate=False)
        found = {self._first_names[name]: value for name, value in every if not value.is_meta}
        for name, parameter in self.named_parameters():
            parameter.data = found[name].data
        self._has_values = True

    def run(
        self,
        share: Share,
        loss_fn: LossFunction,
        *,
        method: Method = PLAIN,
        before_last: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run all passes of the member's samples; see ``parts.interface.OwnSchedule``."""
        result, kept = Result(), dict[int, _InFlight]()
        order = passes(stage=self._stage, stages=self._stages, micro_batches=len(share.sizes))
        try:
            for kind, index in order:
                began_s = time.perf_counter()
                if kind is Pass.FORWARD:
                    load_s = result.load_s
                    kept[index] = self._forward(share, index, method, result)
                    result.forward_s += time.perf_counter() - began_s - (result.load_s - load_s)
                    continue
                if index == len(share.sizes) - 1:
                    before_last()
                self._backward(share, index, kept.pop(index), (loss_fn, method), result)
                result.backward_s += time.perf_counter() - began_s
            self._neighbours.flush()
        except BaseException:
            self._neighbours.forget()
            raise
        return result

    def evaluate(
        self, fetch: Callable[[int], Any], batches: int, measure: Callable[[Any, Any], Any], *, method: Method = PLAIN
    ) -> list[Any]:
        """Return what ``measure`` makes of each batch, on the last stage; see ``parts.interface.OwnSchedule``.

        The first and the last stage fetch batches.
        """
        found = []
        is_first, is_last = self._is_first, self._is_last
        try:
            for index in range(batches):
                batch = inputs_and_targets(fetch(index)) if is_first or is_last else (None, None)
                received = None if is_first else self._receive()
                with torch.no_grad(), method.autocast():
                    output = self._part.forward(received, batch[0])
                    if is_last:
                        found.append(measure(output, batch[1]))
                if not is_last:
                    self._send(output)
                    self._neighbours.flush(keep=4)
            self._neighbours.flush()
        except BaseException:
            self._neighbours.forget()
            raise
        return found

    @property
    def _is_first(self) -> bool:
        return self._stage == 0

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    def _forward(self, share: Share, index: int, method: Method, result: Result) -> _InFlight:
        is_first, is_last = self._is_first, self._is_last
        began_s = time.perf_counter()
        batch = inputs_and_targets(share.fetch(index)) if is_first or is_last else (None, None)
        result.load_s += time.perf_counter() - began_s
        received = None if is_first else self._receive()
        with self._draws.at(share.step, share.start + sum(share.sizes[:index])), method.autocast():
            output = self._part.forward(received, batch[0])
        if not is_last:
            self._send(output)
            output = output[0]
        return _InFlight(received=None if received is None else received[0], output=output, batch=batch[1])

    def _receive(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._neighbours.receive(self._stage - 1) for _ in range(self._part.incoming))

    def _send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            self._neighbours.send(tensor, self._stage + 1)

    def _backward(
        self, share: Share, index: int, passed: _InFlight, how: tuple[LossFunction, Method], result: Result
    ) -> None:
        loss_fn, method = how
        if self._is_last:
            with method.autocast():
                loss, weight = self._loss(loss_fn, passed)
            if loss.dtype in (torch.float16, torch.bfloat16):
                loss = loss.float()  # the factor below would overflow
            samples = share.sizes[index]
            factor = method.loss_scale * (samples if weight is None else 1.0) / share.batch_samples
            result.loss_sum += float(loss.detach()) * (samples if weight is None else 1.0)
            result.weight += samples if weight is None else weight
            loss.backward(loss.new_full(loss.shape, factor))
        elif passed.output.requires_grad:
            gradient = self._neighbours.receive(self._stage + 1)
            torch.autograd.backward(passed.output, gradient)
        if passed.received is not None and passed.received.requires_grad:
            found = passed.received.grad
            self._neighbours.send(torch.zeros_like(passed.received) if found is None else found, self._stage - 1)
            self._neighbours.flush(keep=4)

    def _loss(self, loss_fn: LossFunction, passed: _InFlight) -> tuple[torch.Tensor, float | None]:
        with nullcontext() if self._has_loss else OwnValuesOnly():
            loss, weight = loss_and_weight(loss_fn(passed.output, passed.batch))
        self._has_loss = True
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise UsageError("loss_fn has to return a tensor without dimensions that depends on the model's output")
        if loss.is_meta:
            raise UsageError(
                "the last stage's output needs values of another stage: let the model compute them from the layers' "
                "output, or pass them on in it"
            )
        return loss, weight

    # -- the layout --------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        """Shapes of the whole model's parameters."""
        return self._shapes

    @property
    def holding(self) -> Holding:
        """All elements of the parameters that the stage has."""
        own = {name for name, _ in self.named_parameters()}
        return {name: extent for name, extent in whole(sizes_of(self._shapes)).items() if name in own}

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yield this stage's parameters; a tied one has its first name in the whole model."""
        found = {
            self._first_names[name]: parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if not parameter.is_meta
        }
        yield from ((name, found[name]) for name in self._shapes if name in found)

    def state_dict(self) -> dict[str, Any]:
        """Return the stage's parameters and buffers; tied parameters under their first names, too."""
        found = {name: value for name, value in self.model.state_dict().items() if not _is_meta(value)}
        return found | {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values; tied parameters are taken by their first names, and what other stages hold is ignored.

        Parameters without values share the memory of the given ones; others keep theirs.

        Raises:
            RuntimeError: values are missing or have other shapes.
        """
        own = {name: value for name, value in self.model.state_dict().items() if not _is_meta(value)}
        given = {name: state.get(self._first_names.get(name, name), state.get(name)) for name in own}
        missing = [name for name, value in given.items() if value is None]
        check_keys(self.model, missing, [name for name in state if name not in self._tensors])
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                given[name] = given[name].reshape(value.shape)
        if not self._has_values:
            for name, parameter in self.named_parameters():
                parameter.data = given[name].detach().to(parameter.device, parameter.dtype)
            self._has_values = True
            given = {name: value for name, value in given.items() if name not in self._first_names}
        self.model.load_state_dict(given, strict=False)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
