"""Hooks that run when gradients arrive, on as few parameters as possible: each call out of backward costs time.

A step with several micro-batches needs a hook on each parameter. Each gradient moves into its bucket at once;
otherwise a second copy of all gradients would stay in memory.

A step with one micro-batch needs a hook on the last gradient of each bucket only, which then moves all of the bucket's
gradients together. Large gradients have hooks too: they move while they are still in the processor's cache. The first
such step records which gradient is last. If another gradient turns out to be last, the result is still correct; that
bucket is merely sent late and the order is recorded again.

A hook on every parameter would be simpler, but takes up to 6 % of a short step with many small tensors (ADR 17).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from heterotrain.exchange.flat.buckets import WholeBucket

LARGE_BYTES = 512 * 1024
"""On a CPU, gradients of at least this size are copied at once: a hook costs less than fetching them from memory again.
An accelerator copies all gradients of a bucket in one launch, when the last one has arrived."""
MOST_SURPRISES = 3
"""Wrong orders after which every parameter keeps its hook: the graph differs from step to step."""


@dataclass(slots=True)
class GradientHooks:
    """Hooks on the parameters of some buckets.

    Attributes:
        buckets: the buckets.
        arrive: called with a bucket and a parameter of it whose gradient has arrived.
        move: called with a large parameter, unless it is the last one, when its gradient has arrived.
        close: as ``arrive``, when the gradient is expected to be the bucket's last one.
        ids: numbers of the hooks.
    """

    buckets: Sequence[WholeBucket]
    arrive: Callable[[WholeBucket, torch.nn.Parameter], None]
    move: Callable[[torch.nn.Parameter], None]
    close: Callable[[WholeBucket, torch.nn.Parameter], None]
    ids: set[int] = field(default_factory=set)
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _last: list[torch.nn.Parameter] | None = None
    _is_each: bool | None = None
    _surprises: int = 0

    def begin(self, *, one_micro_batch: bool) -> None:
        """Prepare for a step; ``one_micro_batch``: whether this rank has at most one micro-batch in it."""
        each = not one_micro_batch or self._last is None
        if each is not self._is_each:
            self.end()
            self._is_each = each
            for number, bucket in enumerate(self.buckets):
                last = None if each or self._last is None else self._last[number]
                for parameter in bucket.parameters:
                    is_large = parameter.is_cpu and parameter.numel() * parameter.element_size() >= LARGE_BYTES
                    if each:
                        self._call(parameter, partial(self.arrive, bucket))
                    elif parameter is last:
                        self._call(parameter, partial(self.close, bucket))
                    elif is_large:
                        self._call(parameter, self.move)

    def learn(self, order: Sequence[torch.nn.Parameter]) -> None:
        """Record the order in which gradients arrived in a backward pass, unless some were missing."""
        if self._last is None and self._surprises <= MOST_SURPRISES:
            place_of = {id(parameter): place for place, parameter in enumerate(order)}
            if all(id(parameter) in place_of for bucket in self.buckets for parameter in bucket.parameters):
                self._last = [max(bucket.parameters, key=lambda p: place_of[id(p)]) for bucket in self.buckets]

    def surprised(self) -> None:
        """Drop the recorded order, because a bucket's last gradient was not the last."""
        self._surprises += 1
        self._last = None

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.ids.clear()
        self._is_each = None

    def _call(self, parameter: torch.nn.Parameter, hook: Callable[[torch.nn.Parameter], None]) -> None:
        register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(hook))
        self.ids.add(self._hooks[-1].id)


class GradientWatchers:
    """Hooks on every parameter that show each new gradient of a backward pass, while they are in use.

    Attributes:
        ids: numbers of the hooks.
    """

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._on_gradient: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def watch(
        self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Call ``on_gradient`` with each parameter and each new gradient, until ``rest``."""
        self._on_gradient = on_gradient
        for parameter in () if self._hooks else parameters:
            register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_hook
            self._hooks.append(register(partial(self._look, parameter)))
            self.ids.add(self._hooks[-1].id)

    def rest(self) -> None:
        """Begin a step; a second one in a row that is not watched removes the hooks."""
        if self._hooks and self._on_gradient is None:
            self.end()
        self._on_gradient = None

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.ids.clear()

    def _look(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        if self._on_gradient is not None and gradient is not None:  # a function may return none for a parameter
            self._on_gradient(parameter, gradient)
