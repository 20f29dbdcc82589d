"""Gradient buckets: gradients are summed over ranks while backward still runs.

Each parameter's gradient becomes a view into the flat buffer of its bucket as soon as it is there: backward hands the first
micro-batch's over as it computed it, so nothing has to be cleared and added to. When the last gradient of a bucket has arrived in
the last micro-batch, the bucket's all-reduce starts; buckets start in the same order on every rank. The losses are scaled
before backward so that the plain sum over ranks is the gradient of the global batch: ``g = sum_i (n_i / sum n) g_i``.

Why not DistributedDataParallel: it belongs to one process group, needs the user's forward pass on a rank without samples,
and hides its buffers; this outlives formations, and the wrapped model stays the user's own (docs/adr).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.network.watched import settle
from heterotrain.numerics.compression import Wire, largest
from heterotrain.numerics.timeline import HostTimeline, Moment, Timeline, timeline_of
from heterotrain.state.layers import Layers

MIB = 1024 * 1024
FIRST_BUCKET_BYTES = MIB
"""The first bucket ends when it has this much, whatever the others hold: a slow link gets something to carry early."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Some parameters and the flat buffer that holds their gradients."""

    flat: torch.Tensor
    parameters: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    wire: Wire | None = None
    packed: torch.Tensor | None = None
    missing: int = 0
    work: dist.Work | None = None
    started: Moment | None = None
    done: Moment | None = None


@dataclass(slots=True)
class Timing:
    """Moments of one step's last backward pass; ``waited`` is when the last bucket was there."""

    began: Moment | None = None
    first_bucket: Moment | None = None
    waited: Moment | None = None


@dataclass(slots=True)
class Reducer:
    """Buckets over a model's parameters; knows nothing of steps or plans.

    Attributes:
        model: whose parameters they are.
        bucket_bytes: most bytes of a bucket.
        wire: makes a bucket's way to the other ranks; ``None`` when gradients travel as they are.
        on_launch: sees each bucket before it is reduced.
        timing: of the newest attempt.
        timeline: of the device that holds the first gradient.
    """

    model: torch.nn.Module
    bucket_bytes: int
    wire: Callable[[], Wire] | None = None
    on_launch: Callable[[Bucket], None] | None = None
    timing: Timing = field(default_factory=Timing)
    timeline: Timeline = field(default_factory=HostTimeline)
    _buckets: list[Bucket] = field(default_factory=list)
    _place_of: dict[int, tuple[Bucket, torch.Tensor]] = field(default_factory=dict)
    _layers: Layers | None = None
    _arrived: set[int] = field(default_factory=set)
    _signature: tuple[bool, ...] = ()
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _group: Group | None = None
    _armed: bool = False
    _next: int = 0
    _watching: bool = False
    _on_gradient: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._buckets

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat gradient buffers, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def begin(self) -> None:
        """Start a step without gradients; notices parameters that were frozen or thawed since."""
        self._layers = self._layers or Layers(self.model)
        signature = self._layers.wants_gradients()
        if signature != self._signature:
            self._build()
            self._signature = signature
        self.abandon()
        self.on_launch = self._on_gradient = None
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None

    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Show each parameter with what a backward pass adds to its gradient, until the next step begins."""
        self._on_gradient = on_gradient
        if self._watching:
            return
        self._watching = True  # from now on, because a call for each parameter costs time

        def look(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            if self._on_gradient is not None:
                self._on_gradient(parameter, gradient)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_hook(partial(look, parameter)))  # type: ignore[no-untyped-call]

    def arm(self, group: Group | None) -> None:
        """Let the next backward pass start the reductions over ``group`` (``None``: this rank is alone)."""
        if group is not self._group and self.wire is not None:
            for bucket in self._buckets:
                bucket.wire = self.wire()  # what one formation has learned, a newcomer does not know
        self._group, self._armed, self._next = group, True, 0
        self._arrived.clear()
        self.timing = Timing(began=self.timeline.now())
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = bucket.started = bucket.done = None

    def flush(self) -> None:
        """Start what is left after backward: buckets of parameters that got no gradient."""
        for bucket in self._buckets[self._next :]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
                    parameter.grad = view
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
        self.timing.waited = self.timeline.now()
        for bucket in self._buckets:
            bucket.work = bucket.packed = None

    def abandon(self) -> None:
        """Forget a step that failed; returns when its operations have let go of the buffers (cut the group before)."""
        settle([bucket.work for bucket in self._buckets if bucket.work is not None])
        for bucket in self._buckets:
            bucket.work = bucket.packed = None
        self._armed = False

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def clamp(self, limit: float) -> None:
        """Bring every element of the gradients into [-limit, limit]."""
        for bucket in self._buckets:
            bucket.flat.clamp_(-limit, limit)

    def transfers_s(self) -> tuple[float, ...]:
        """Return each bucket's transfer seconds in the step that was waited for, nothing when nothing was exchanged.

        Time in which an earlier bucket still used the wire is not a bucket's own.
        """
        began, waited = self.timing.began, self.timing.waited
        if began is None or waited is None:
            return ()
        seconds, free_s = [], 0.0
        for bucket in self._buckets:
            done = bucket.done  # the note may come after the wait returned
            if bucket.started is None or (done is not None and not self.timeline.is_past(done)):
                return ()
            done_s = self.timeline.seconds(began, waited if done is None else done)
            seconds.append(max(0.0, done_s - max(self.timeline.seconds(began, bucket.started), free_s)))
            free_s = max(free_s, done_s)
        return tuple(seconds)

    def is_finite(self) -> bool:
        """Return whether every element is finite: the same on all ranks once the buckets are reduced."""
        return all(math.isfinite(largest(bucket.flat)) for bucket in self._buckets)

    def squared_norm(self) -> torch.Tensor | float:
        """Return the squared norm over all gradients in float64."""
        return squared_norm(self.flats)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._buckets, self._place_of, self._watching = [], [], {}, False
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError("the model has no parameter that requires a gradient: nothing can be trained")
        self.timeline = timeline_of(trainable[0].device)
        # Backward reaches the last layers first: their bucket can start while the rest is still being computed.
        for parameters in _cut(list(reversed(trainable)), FIRST_BUCKET_BYTES, self.bucket_bytes):
            first = parameters[0]
            flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
            views, offset = [], 0
            for parameter in parameters:
                views.append(flat[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()
            bucket = Bucket(flat=flat, parameters=parameters, views=views, wire=self.wire() if self.wire else None)
            self._buckets.append(bucket)
            for parameter, view in zip(parameters, views, strict=True):
                self._place_of[id(parameter)] = (bucket, view)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrive))  # type: ignore[no-untyped-call]

    def _arrive(self, parameter: torch.Tensor) -> None:
        bucket, view = self._place_of[id(parameter)]
        if parameter.grad is not view:  # the step's first, or something replaced the gradient instead of adding to it
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
        if not self._armed:
            return
        if id(parameter) in self._arrived:
            raise UsageError(
                "a parameter got its gradient twice in one backward pass: use step.backward once for each micro-batch, "
                "and checkpoint activations with use_reentrant=False"
            )
        self._arrived.add(id(parameter))
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.started = self.timeline.now()
        if self.timing.first_bucket is None:
            self.timing.first_bucket = bucket.started
        if self.on_launch is not None:
            self.on_launch(bucket)
        if self._group is None or self._group.world_size == 1:
            return

        def note(_future: object) -> None:
            bucket.done = self.timeline.now()  # with NCCL this runs at once, in a stream that waits for the reduction

        is_last = self._next == len(self._buckets)
        bucket.packed = bucket.wire.pack(bucket.flat) if bucket.wire is not None else None
        bucket.work = self._group.all_reduce(bucket.flat if bucket.packed is None else bucket.packed)
        if (
            not is_last
        ):  # gloo's thread would have to wait for this one to let go of the interpreter; ``wait`` sees it itself
            bucket.work.get_future().add_done_callback(note)

    def _unpack(self, bucket: Bucket, group: Group) -> None:
        if bucket.wire is None:
            return
        if bucket.packed is not None:
            if bucket.wire.unpack(bucket.packed, bucket.flat):
                return
            group.wait(group.all_reduce(bucket.flat))  # every rank sees the same sum that did not fit
        bucket.wire.learn(bucket.flat)


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """Return the sum of squares of all elements in float64; half formats are summed in fp32.

    It is a tensor where it would have to be fetched from an accelerator, and a plain number, which costs less, elsewhere.
    """
    total: torch.Tensor | float = 0.0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        square = torch.dot(flat, flat)
        total = total + (square.item() if square.is_cpu else square.double())
    return total


def _cut(parameters: list[torch.nn.Parameter], first_bytes: int, limit_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Cut the list into runs of one dtype and device with at most ``limit_bytes`` (a larger parameter stands alone).

    The first run ends as soon as it has ``first_bytes``.
    """
    runs: list[list[torch.nn.Parameter]] = []
    used = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        same = bool(runs) and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or used + size > limit_bytes or (len(runs) == 1 and used >= first_bytes):
            runs.append([])
            used = 0
        runs[-1].append(parameter)
        used += size
    return runs
