"""Who calls when gradients arrive: as few parameters as possible, because each call out of backward costs time.

A step that adds micro-batches up needs a call for each parameter: its gradient moves into the bucket at once, or a second
copy of all gradients would stay in memory. With one micro-batch it is enough to hear of the last gradient of each bucket, and of large
ones, which move while they are still in the processor's cache: what else came before lies at the parameters and moves all at once. Which one is the last is learned from the first such step; a
step in which it was not the last is as right, only its bucket travels late, and the order is learned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from heterotrain.numerics.buckets import Bucket

LARGE_BYTES = 512 * 1024
"""A gradient from here on is copied at once: a call costs less than fetching it from memory again."""
MOST_SURPRISES = 3
"""How often an order may turn out wrong before every parameter calls for good: the graph is another one each time."""


@dataclass(slots=True)
class GradientHooks:
    """Hooks on the parameters of some buckets.

    Attributes:
        arrive: called with a parameter and its bucket when its gradient is there.
        move: called with a large parameter when its gradient is there, if it is not the last.
        close: called with a bucket when its last gradient ought to be there.
    """

    buckets: Sequence[Bucket]
    arrive: Callable[[torch.nn.Parameter, Bucket], None]
    move: Callable[[torch.nn.Parameter], None]
    close: Callable[[Bucket], None]
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _last: list[torch.nn.Parameter] | None = None
    _is_each: bool | None = None
    _surprises: int = 0

    def begin(self, *, one_micro_batch: bool) -> None:
        """Prepare for a step; ``one_micro_batch`` says whether this rank has no more than one in it."""
        each = not one_micro_batch or self._last is None
        if each is not self._is_each:
            self.end()
            self._is_each = each
            for number, bucket in enumerate(self.buckets):
                last = None if each or self._last is None else self._last[number]
                for parameter in bucket.parameters:
                    if each or parameter is last or parameter.numel() * parameter.element_size() >= LARGE_BYTES:
                        self._call(parameter, bucket, each=each, is_last=parameter is last)

    def learn(self, order: Sequence[torch.nn.Parameter]) -> None:
        """Take notice of the order in which a backward pass brought all gradients; of fewer, nothing is learned."""
        if self._last is None and self._surprises <= MOST_SURPRISES:
            place_of = {id(parameter): place for place, parameter in enumerate(order)}
            if all(id(parameter) in place_of for bucket in self.buckets for parameter in bucket.parameters):
                self._last = [max(bucket.parameters, key=lambda p: place_of[id(p)]) for bucket in self.buckets]

    def surprised(self) -> None:
        """Take notice that the last gradient of a bucket was not the last."""
        self._surprises += 1
        self._last = None

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._is_each = None

    def _call(self, parameter: torch.nn.Parameter, bucket: Bucket, *, each: bool, is_last: bool) -> None:
        def arrived(_gradient_is_there: torch.Tensor) -> None:
            if each:
                self.arrive(parameter, bucket)
            elif is_last:
                self.close(bucket)
            else:
                self.move(parameter)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]  # torch leaves it untyped
