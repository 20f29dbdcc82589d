"""Gradients are summed over ranks while backward still runs.

Each parameter's gradient becomes a view into the flat buffer of its bucket (``buckets.py``) when it is there (``gradient_hooks.py``):
backward hands the first micro-batch's over as it computed it, so nothing has to be cleared and added to. When the last gradient of a
bucket has arrived in the last micro-batch, the bucket's all-reduce starts; buckets start in the same order on every rank. The losses
are scaled before backward so that the plain sum over ranks is the gradient of the global batch: ``g = sum_i (n_i / sum n) g_i``.

Why not DistributedDataParallel: it belongs to one process group, needs the user's forward pass on a rank without samples,
and hides its buffers; this outlives formations, and the wrapped model stays the user's own (docs/adr).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from heterotrain.errors import UsageError
from heterotrain.network.gloo.bounded_wait import settle
from heterotrain.network.group import Group
from heterotrain.numerics.buckets import Bucket, buckets_of, squared_norm
from heterotrain.numerics.compression import Compressor, largest
from heterotrain.numerics.gradient_hooks import GradientHooks
from heterotrain.numerics.timeline import HostTimeline, Timeline, timeline_of
from heterotrain.numerics.transfers import ReductionTimestamps, transfers_s
from heterotrain.state.layers import Layers

TWICE = (
    "a parameter got its gradient twice in one backward pass: use step.backward once for each micro-batch, and checkpoint "
    "activations with use_reentrant=False"
)


@dataclass(slots=True)
class Reducer:
    """Buckets over a model's parameters; knows nothing of steps or plans.

    Attributes:
        model: whose parameters they are.
        bucket_bytes: a bucket ends as soon as it holds so many.
        make_compressor: makes a bucket's way to the other ranks; ``None`` when gradients travel as they are.
        on_launch: sees each bucket before it is reduced.
        timestamps: of the newest attempt.
        timeline: of the device that holds the first gradient.
        elements: numbers in all gradients; known when a step has begun.
    """

    model: torch.nn.Module
    bucket_bytes: int
    make_compressor: Callable[[], Compressor] | None = None
    on_launch: Callable[[Bucket], None] | None = None
    timestamps: ReductionTimestamps = field(default_factory=ReductionTimestamps)
    timeline: Timeline = field(default_factory=HostTimeline)
    elements: int = 0
    _buckets: list[Bucket] = field(default_factory=list)
    _view_of: dict[int, torch.Tensor] = field(default_factory=dict)
    _layers: Layers | None = None
    _hooks: GradientHooks | None = None
    _arrived: dict[int, torch.nn.Parameter] = field(default_factory=dict)
    _signature: tuple[bool, ...] = ()
    _group: Group | None = None
    _armed: bool = False
    _next: int = 0
    _watchers: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _on_gradient: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._buckets

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat gradient buffers, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def begin(self, *, micro_batches: int = 1) -> None:
        """Start a step without gradients; notices parameters that were frozen or thawed since.

        Args:
            micro_batches: backward passes that this rank adds up in it.

        Raises:
            UsageError: nothing of the model can be trained.
        """
        self._layers = self._layers or Layers(self.model)
        signature = self._layers.requires_grad_flags()
        if signature != self._signature:
            self._build()
            self._signature = signature
        self.abandon()
        if self._watchers and self._on_gradient is None:  # nobody looked in the step before
            self._unwatch()
        self.on_launch = self._on_gradient = None
        self._require_hooks().begin(one_micro_batch=micro_batches <= 1)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Show each parameter with what a backward pass adds to its gradient, until the next step begins."""
        self._on_gradient = on_gradient
        if self._watchers:
            return

        def look(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            if self._on_gradient is not None:
                self._on_gradient(parameter, gradient)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._watchers.append(parameter.register_hook(partial(look, parameter)))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def arm(self, group: Group | None) -> None:
        """Let the next backward pass, the step's last, start the reductions over ``group`` (``None``: this rank is alone)."""
        if group is not self._group and self.make_compressor is not None:
            for bucket in self._buckets:
                bucket.compressor = self.make_compressor()  # what one formation has learned, a newcomer does not know
        self._group, self._armed, self._next = group, True, 0
        self._arrived.clear()
        self.timestamps = ReductionTimestamps(began=self.timeline.now())
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = bucket.started = bucket.done = None

    def flush(self) -> None:
        """Start what is left after backward: buckets of parameters that got no gradient.

        Raises:
            UsageError: a gradient came after its bucket had been sent off.
        """
        if self._armed:
            if any(bucket.flat._version != bucket.version for bucket in self._buckets[: self._next]):  # noqa: SLF001 - as in _launch
                raise UsageError(TWICE)
            self._require_hooks().learn(list(self._arrived.values()))
        for bucket in self._buckets[self._next :]:
            bucket.complete()
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        self._armed = False

    def wait(self) -> None:
        """Return when every bucket is reduced.

        Raises:
            PeerLost: the group is broken.
        """
        if self._group is None:
            return
        for number, bucket in enumerate(self._buckets, 1):
            if bucket.work is not None:
                self._group.wait(bucket.work, f"gradient bucket {number} of {len(self._buckets)}")
                if number == len(self._buckets):
                    bucket.done = self.timeline.now()
                self._unpack(bucket, self._group)
        self.timestamps.waited = self.timeline.now()
        for bucket in self._buckets:
            bucket.work = bucket.packed = None

    def abandon(self) -> None:
        """Forget a step that failed; returns when its operations have let go of the buffers (cut the group before)."""
        settle([bucket.work for bucket in self._buckets if bucket.work is not None])
        for bucket in self._buckets:
            bucket.work = bucket.packed = None
        self._armed = False

    def scale(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Bring every element of the gradients into [-limit, limit]."""
        for bucket in self._buckets:
            bucket.flat.clamp_(-limit, limit)

    def transfers_s(self) -> tuple[float, ...]:
        """Return each bucket's transfer seconds in the step that was waited for (``transfers.py``)."""
        return transfers_s(self._buckets, self.timestamps, self.timeline)

    def is_finite(self) -> bool:
        """Return whether every element is finite: the same on all ranks once the buckets are reduced."""
        return all(math.isfinite(largest(bucket.flat)) for bucket in self._buckets)

    def squared_norm(self) -> torch.Tensor | float:
        """Return the squared norm over all gradients in float64."""
        return squared_norm(self.flats)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError(
                "the model has no parameter that requires a gradient, so nothing can be trained: call requires_grad_() on "
                "those that shall be"
            )
        if self._hooks is not None:
            self._hooks.end()
        self._unwatch()
        self.timeline = timeline_of(trainable[0].device)
        self._buckets = buckets_of(trainable, enough_bytes=self.bucket_bytes)
        if self.make_compressor is not None:
            for bucket in self._buckets:
                bucket.compressor = self.make_compressor()
        self._view_of = {
            id(p): view for bucket in self._buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._hooks = GradientHooks(self._buckets, arrive=self._arrive, move=self._move, close=self._close)
        self.elements = sum(bucket.flat.numel() for bucket in self._buckets)

    def _unwatch(self) -> None:
        for watcher in self._watchers:
            watcher.remove()
        self._watchers.clear()

    def _require_hooks(self) -> GradientHooks:
        if self._hooks is None:
            raise UsageError("call reducer.begin() before a backward pass")
        return self._hooks

    def _arrive(self, parameter: torch.nn.Parameter, bucket: Bucket) -> None:
        """Move one gradient into its bucket; send off what is complete."""
        self._move(parameter)
        if not self._armed:
            return
        if id(parameter) in self._arrived:
            raise UsageError(TWICE)
        self._arrived[id(parameter)] = parameter
        bucket.missing -= 1
        self._launch_complete()

    def _move(self, parameter: torch.nn.Parameter) -> None:
        view = self._view_of[id(parameter)]
        if parameter.grad is not view:  # the step's first, or something replaced the gradient instead of adding to it
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view

    def _close(self, bucket: Bucket) -> None:
        """Move a bucket's gradients at once, since its last one ought to be there; send off what is complete."""
        if not self._armed or not bucket.missing:
            return
        if not bucket.take():
            self._require_hooks().surprised()  # ``flush`` sees to the bucket
            return
        bucket.missing = 0
        self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.started = self.timeline.now()
        bucket.version = bucket.flat._version  # noqa: SLF001 - torch's own count of changes; views share it
        if self.timestamps.first_bucket is None:
            self.timestamps.first_bucket = bucket.started
        if self.on_launch is not None:
            self.on_launch(bucket)
        if self._group is None or self._group.world_size == 1:
            return
        is_last = self._next == len(self._buckets)
        bucket.packed = bucket.compressor.pack(bucket.flat) if bucket.compressor is not None else None
        bucket.work = self._group.all_reduce(bucket.flat if bucket.packed is None else bucket.packed)
        if (
            is_last
        ):  # gloo's thread would have to wait for this one to let go of the interpreter; ``wait`` sees it itself
            return

        def note(_future: object) -> None:
            bucket.done = self.timeline.now()  # with NCCL this runs at once, in a stream that waits for the reduction

        bucket.work.get_future().add_done_callback(note)

    def _unpack(self, bucket: Bucket, group: Group) -> None:
        if bucket.compressor is None:
            return
        if bucket.packed is not None:
            if bucket.compressor.unpack(bucket.packed, bucket.flat):
                return
            group.wait(group.all_reduce(bucket.flat))  # every rank sees the same sum that did not fit
        bucket.compressor.learn(bucket.flat)
