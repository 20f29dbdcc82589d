"""Gathers, reduces and releases the units of a rank during its forward and backward passes.

Ranks tell messages apart by their order alone, so all ranks of a member exchange the same units in the same order:
forwards in the order of the list of layers, and backwards in the opposite one. A layer that a rank's samples skip is
gathered and released there all the same. A unit is reduced when the backward pass of the unit before it begins.
Autograd computes the latest parts of the forward pass first, so all its gradients are there.

When a unit begins to compute, the one that computes next begins to be gathered. So two units are in memory, and in the
backward pass the gradient of one. A gradient is reduced before the next unit computes, in the memory that its
parameters leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from heterotrain.errors import UsageError
from heterotrain.parts.unequal.gathered_unit import GatheredUnit


class UnitPasses:
    """The passes of a model; hooks on it and on its layers call this object."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        units: Sequence[GatheredUnit],
        rest: GatheredUnit,
    ) -> None:
        """Put hooks on the model.

        Args:
            model: the whole model.
            layers: those that are gathered one at a time, in the order of computation.
            units: their parameters, by ``layers``.
            rest: all other parameters, gathered throughout a pass.
        """
        self._units, self._rest = tuple(units), rest
        self._in_backward = False
        self._entered = -1
        """The last layer that was entered, or passed over."""
        self._begun = self._backward_to = len(self._units)
        """The first layer whose backward pass has begun, and the first one that has such a pass."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entering(number))
            layer.register_forward_hook(self._leaving(number))
        model.register_forward_pre_hook(self._beginning)
        model.register_forward_hook(self._ending)

    def forget(self) -> None:
        """Leave a pass that was interrupted at any point; parts keep their values and gradients."""
        self._in_backward = False
        for unit in (self._rest, *self._units):
            unit.forget()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _beginning(self, *_: object) -> None:
        if self._in_backward:
            return
        self._entered, self._begun, self._backward_to = -1, len(self._units), len(self._units)
        for unit in (self._rest, *self._units):
            unit.release()  # a pass without a backward pass leaves units gathered, with the values of then
        self._rest.gather()
        self._begin_gathering(0)

    def _begin_gathering(self, number: int) -> None:
        """Let a unit be on its way while the present one computes; all ranks call this at the same points."""
        if 0 <= number < len(self._units):
            self._units[number].begin_gathering()

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if not self._in_backward:
                if number <= self._entered:
                    raise UsageError(
                        f"layer {number} of the list runs after layer {self._entered}: members of several workers need "
                        "a model that runs each layer of its list once, in their order"
                    )
                self._pass_over(number)
                self._entered = number
            self._units[number].gather()
            if not self._in_backward:
                self._begin_gathering(number + 1)

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(_layer: Any, _arguments: Any, output: Any) -> None:
            if self._in_backward:
                return
            if torch.is_grad_enabled():
                self._before_backward(number, output)
            self._left(number)

        return hook

    def _pass_over(self, number: int) -> None:
        """Gather and release the layers that were skipped before this one."""
        for skipped in range(self._entered + 1, number):
            self._units[skipped].gather()
            self._begin_gathering(skipped + 1)
            self._left(skipped)

    def _left(self, number: int) -> None:
        unit = self._units[number]
        if torch.is_grad_enabled() and unit.is_trained:
            self._backward_to = min(self._backward_to, number)
        if unit is not self._units[-1] or not torch.is_grad_enabled():  # backward begins with the last one
            unit.release()

    def _ending(self, _model: Any, _arguments: Any, output: Any) -> None:
        if self._in_backward:
            return
        self._pass_over(len(self._units))
        if torch.is_grad_enabled():
            self._before_backward(None, output)
        else:
            self._rest.release()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _before_backward(self, number: int | None, output: Any) -> None:
        """Gather a layer, ``None`` for what is around the list, when the gradient of its output is there."""

        def begins(_gradient: torch.Tensor) -> None:
            if not self._in_backward:
                self._in_backward = True
                engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP itself
                engine.queue_callback(self._backward_ended)
                self._rest.begin_backward()
            if number is not None:
                self._begin_backward(number)

        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if number is not None:
                    self._backward_to = min(self._backward_to, number)
                register: Any = leaf.register_hook
                register(begins)

    def _begin_backward(self, number: int) -> None:
        """Begin with a layer, and with those after it that have not begun; reduce those that are over.

        Raises:
            UsageError: its gradients are reduced already.
            PeerLost: another rank of the member is lost or has left the pass.
        """
        if number > self._begun:
            raise UsageError(
                f"layer {number} of the list has a gradient after layer {self._begun}, which was computed before it: "
                "let each layer compute from the output of the one before it"
            )
        while self._begun > number:
            if self._begun < len(self._units):
                self._end(self._units[self._begun])
            self._begun -= 1
            self._units[self._begun].begin_backward()
            if self._begun > self._backward_to:
                self._begin_gathering(self._begun - 1)

    def _end(self, unit: GatheredUnit) -> None:
        if unit.is_open:
            unit.reduce()
        unit.release()  # a frozen one is gathered still

    def _backward_ended(self) -> None:
        self._in_backward = False
        self._begin_backward(self._backward_to)
        for unit in (*reversed(self._units), self._rest):
            self._end(unit)
        for unit in (self._rest, *self._units):
            unit.check_ended()
