"""Sums gradients over all ranks while the backward pass is still running.

When a parameter's gradient has arrived (``gradient_hooks.py``), it becomes a view into the flat buffer of its bucket
(``buckets.py``). The first micro-batch's gradients are taken as backward computed them, so buffers need not be
cleared. When the last gradient of a bucket has arrived in the last micro-batch, the bucket's all-reduce starts.
Buckets start in the same order on every rank. Losses are scaled before backward such that the plain sum over ranks is
the gradient of the global batch: ``g = sum_i (n_i / sum n) g_i``.

DistributedDataParallel does not fit here: it belongs to one process group, needs the user's forward pass on a rank
without samples, and hides its buffers. This class outlives formations, and the wrapped model stays the user's own
(docs/adr/0003).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from heterotrain.errors import UsageError
from heterotrain.exchange import gate
from heterotrain.exchange.flat.bucket_order import arrange, leave_in_order, share_order
from heterotrain.exchange.flat.buckets import Bucket, buckets_of, check_dense, squared_norm
from heterotrain.exchange.flat.compression import Compressor
from heterotrain.exchange.flat.gradient_hooks import GradientHooks
from heterotrain.exchange.flat.script_hooks import ScriptHooks
from heterotrain.exchange.flat.transfers import ReductionTimestamps, transfers_s
from heterotrain.exchange.timeline import HostTimeline, Timeline, timeline_of
from heterotrain.network.group import Group
from heterotrain.state.finite import all_finite, is_finite
from heterotrain.state.layers import Layers
from heterotrain.state.strides import order_of

TWICE = (
    "a parameter got its gradient twice in one backward pass. Call step.backward once for each micro-batch, and "
    "checkpoint activations with use_reentrant=False."
)
CHANGED = (
    "gradients were changed before all of the step's gradients had been added up over ranks: move this (zero_grad, "
    "clip_grad_norm_, scaler.unscale_, …) behind the loop over step.micro_batches(), where they are complete, or leave "
    "it out. A step begins without gradients, and step.apply(optimizer, clip_norm=…) clips."
)
CLEARED = (
    "the step's gradients were dropped before step.apply, so it would change nothing: leave out optimizer.zero_grad(), "
    "because each step begins without gradients"
)
THAWED = (
    "parameters were frozen, unfrozen or replaced while the step's gradients were computed: do this before the loop "
    "over step.micro_batches(), whose body a rank without samples does not run"
)


@dataclass(slots=True)
class Reducer:
    """The buckets of a model's parameters; independent of steps and plans.

    Attributes:
        model: the model.
        bucket_bytes: a bucket ends as soon as it holds this much.
        make_compressor: makes a bucket's compressor; ``None`` sends gradients uncompressed.
        is_measurable: whether a rank's own gradient is a mean over its samples, taken micro-batch by micro-batch.
        on_change: called when trainable parameters have been added, replaced, frozen or unfrozen, before a step.
        timestamps: timestamps of the newest attempt.
        timeline: timeline of the device that holds the first gradient.
        elements: number of elements in all gradients; known once a step has begun.
        order: positions of parameters in the order in which their gradients arrive, the same on all ranks; empty while
            unknown.
        script_hooks: hooks of the script on parameters, which rest until the reduction.
        wants_order: whether the ranks should agree on the order after the next committed step.
    """

    model: torch.nn.Module
    bucket_bytes: int
    make_compressor: Callable[[], Compressor] | None = None
    on_change: Callable[[], None] | None = None
    is_measurable: bool = True
    timestamps: ReductionTimestamps = field(default_factory=ReductionTimestamps)
    timeline: Timeline = field(default_factory=HostTimeline)
    elements: int = 0
    order: tuple[int, ...] = ()
    wants_order: bool = False
    script_hooks: ScriptHooks = field(default_factory=ScriptHooks)
    _buckets: list[Bucket] = field(default_factory=list)
    _view_of: dict[int, torch.Tensor] = field(default_factory=dict)
    _layers: Layers | None = None
    _hooks: GradientHooks | None = None
    _arrived: dict[int, torch.nn.Parameter] = field(default_factory=dict)
    _moved: set[int] = field(default_factory=set)
    _trainable: list[int] | None = None
    _signature: int = 0
    _is_new: bool = False
    _held: bool = False
    _is_complete: bool = False
    _is_late: bool = False
    _group: Group | None = None
    _armed: bool = False
    _next: int = 0
    _watchers: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _on_gradient: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    _on_launch: Callable[[Bucket], None] | None = None

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._buckets

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat gradient buffers, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def begin(self, *, micro_batches: int = 1) -> None:
        """Start a step without gradients; takes account of parameters that were frozen or unfrozen since the last one.

        Args:
            micro_batches: backward passes that this rank adds up in the step.

        Raises:
            UsageError: no parameter of the model can be trained.
        """
        self._layers = self._layers or Layers(self.model)
        self.abandon()
        if self._layers.trainable_ids() != self._trainable:
            self._build()
            self._trainable = self._layers.trainable_ids()
            if self.on_change is not None:
                self.on_change()
        self._moved.clear()
        self._is_complete = False
        if self._watchers and self._on_gradient is None:  # the last step was not watched
            self._unwatch()
        self._on_launch = self._on_gradient = None
        hooks = self._require_hooks()
        hooks.begin(one_micro_batch=micro_batches <= 1)
        own = hooks.ids | {watcher.id for watcher in self._watchers} if self._watchers else hooks.ids
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
                tensor_hooks, other_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001  # torch has no public list of them
                if (tensor_hooks and not tensor_hooks.keys() <= own) or (other_hooks and not other_hooks.keys() <= own):
                    self.script_hooks.rest(parameter, own)

    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Call ``on_gradient`` with each parameter and each new gradient of a backward pass, until the next step."""
        self._on_gradient = on_gradient
        if self._watchers:
            return

        def look(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            if self._on_gradient is not None:
                self._on_gradient(parameter, gradient)

        for bucket in self._buckets:
            for parameter in bucket.parameters:
                register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_hook
                self._watchers.append(register(partial(look, parameter)))

    def watch_buckets(self, on_launch: Callable[[Bucket], None]) -> None:
        """Call ``on_launch`` with each bucket before it is reduced, until the next step."""
        self._on_launch = on_launch

    def arm(self, group: Group | None) -> None:
        """Let the next backward pass, the step's last, start the reductions over ``group`` (``None``: no peers)."""
        if group is not self._group and self.make_compressor is not None:
            for bucket in self._buckets:
                bucket.compressor = self.make_compressor()  # new members do not have the old formation's scales
        self._is_new = self._is_new or group is not self._group
        self._group, self._armed, self._next = group, True, 0
        self._held = self._is_new and group is not None and group.world_size > 1
        self._arrived.clear()
        self.timestamps = ReductionTimestamps(began=self.timeline.now())
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.unused.clear()
            bucket.work = bucket.started = bucket.done = bucket.timed = bucket.is_finite = None

    def flush(self) -> None:
        """Start the buckets that are left after backward, because some parameters got no gradient.

        Raises:
            UsageError: a gradient arrived after its bucket had been sent.
        """
        if self._armed:
            for bucket in self._buckets[: self._next]:
                if bucket.flat._version != bucket.version:  # noqa: SLF001  # as in _launch
                    raise UsageError(TWICE)
            self._require_hooks().learn(list(self._arrived.values()))
        for bucket in self._buckets[self._next :]:
            bucket.complete()
            bucket.version = bucket.flat._version  # noqa: SLF001  # as in _launch
        self._armed, self._is_complete = False, True
        if self._held and self._on_launch is not None:  # now, because they belong to this backward pass
            for bucket in self._buckets:
                self._on_launch(bucket)
        while not self._held and self._next < len(self._buckets):
            self._launch(self._buckets[self._next])

    def remember(self) -> None:
        """Record the gradients' versions after a backward pass that is not the step's last."""
        for bucket in self._buckets:
            bucket.version = bucket.flat._version  # noqa: SLF001  # as in _launch

    def check_untouched(self) -> None:
        """Check that nothing has changed the gradients since the last backward pass.

        Raises:
            UsageError: something has, or other parameters can be trained now.
        """
        for bucket in self._buckets:
            if bucket.flat._version != bucket.version:  # noqa: SLF001  # as in _launch
                raise UsageError(CHANGED)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view and (self._is_complete or id(parameter) in self._moved):
                    raise UsageError(CHANGED)
        if self._layers is not None and self._layers.trainable_ids(look=False) != self._trainable:
            raise UsageError(THAWED)

    @property
    def is_held(self) -> bool:
        """Whether buckets wait for ``release``: the first time in a formation, and after parameters have changed.

        A reduction between ranks with other parameters would hang, or end the process inside torch.
        """
        return self._held

    def release(self) -> None:
        """Start the reductions that were held, now that all ranks are known to have the same ``signature``."""
        self._held = self._is_new = False
        self._on_launch = None  # was called by ``flush``
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])

    @property
    def signature(self) -> int:
        """A checksum of names, shapes, strides and formats of the parameters in the buckets."""
        return self._signature

    @property
    def parameters(self) -> int:
        """Number of parameters in the buckets."""
        return len(self._view_of)

    @property
    def unused(self) -> int:
        """The parameters that got no gradient on this rank in this step: bit i stands for the i-th in the buckets."""
        found = first = 0
        for bucket in self._buckets:
            for place in bucket.unused:
                found |= 1 << (first + place)
            first += len(bucket.parameters)
        return found

    def drop_unused(self, unused: int) -> None:
        """Leave parameters that no rank has used without a gradient, so that the optimizer does not touch them.

        Args:
            unused: those that are ``unused`` on every rank.
        """
        if not unused:
            return
        first = 0
        for bucket in self._buckets:
            bucket.unused = [place for place in bucket.unused if unused >> (first + place) & 1]
            for place in bucket.unused:
                bucket.parameters[place].grad = None
            first += len(bucket.parameters)

    def check_kept(self) -> None:
        """Check that the script has not dropped all gradients since the reduction.

        Raises:
            UsageError: it has.
        """
        dropped = False
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:
                    return
                dropped = dropped or place not in bucket.unused
        if dropped:
            raise UsageError(CLEARED)

    def take_back(self) -> bool:
        """Take gradients that the script has replaced since ``remember`` into the buckets, and zeros for dropped ones.

        Returns:
            Whether the script has changed any gradient.
        """
        changed = False
        for bucket in self._buckets:
            changed = changed or bucket.flat._version != bucket.version  # noqa: SLF001  # as in _launch
            for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                gradient = parameter.grad
                if gradient is view:
                    continue
                if gradient is not None:
                    view.copy_(gradient)
                    parameter.grad = view
                    changed = True
                elif place not in bucket.unused:
                    view.zero_()
                    changed = True
        return changed

    def wait(self) -> None:
        """Wait until every bucket is reduced.

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
                if bucket.flat.is_cpu:  # while later buckets travel
                    bucket.is_finite = is_finite(bucket.flat)
        self.timestamps.waited = self.timeline.now()
        for bucket in self._buckets:
            bucket.timed = bucket.work if bucket.work is not None and bucket.work.is_timed else None
            bucket.work = bucket.packed = None

    def abandon(self) -> None:
        """Drop a failed step; waits until its operations have released the buffers (cut the group first)."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.settle()
            bucket.work = bucket.packed = None
        self._armed = self._held = False
        if self.script_hooks.resting:
            self.script_hooks.wake()

    def scale(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        torch._foreach_mul_(self.flats, factor)

    def clamp(self, limit: float) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        for bucket in self._buckets:
            bucket.flat.clamp_(-limit, limit)

    def transfers_s(self) -> tuple[float, ...]:
        """Return each bucket's transfer seconds in the last step that ``wait`` has finished (``transfers.py``)."""
        timed = [bucket.timed for bucket in self._buckets if bucket.timed is not None]
        if timed:
            lengths_s = [work.seconds() for work in timed]
            return tuple(s for s in lengths_s if s is not None) if None not in lengths_s else ()
        return transfers_s(self._buckets, self.timestamps, self.timeline)

    def is_finite(self) -> bool:
        """Return whether every element is finite; after the reduction this is the same on all ranks."""
        if self._is_late:
            return all_finite(self.flats)
        found = True
        for bucket in self._buckets:
            if bucket.is_finite is None:
                bucket.is_finite = is_finite(bucket.flat) if bucket.flat.is_floating_point() else True
            found = found and bucket.is_finite
        return found

    def gate(self) -> gate.Gate | None:
        """Queue a gate behind the sums and return it; ``None`` where the sums are known, and on several devices."""
        if not self._is_late:
            return None
        return gate.Gate(self.flats, None if self._group is None else self._group.flag)

    def first_non_finite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite; ``None`` if there is none."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not all_finite([parameter.grad]):
                return name
        return None

    @property
    def known_squared(self) -> float | None:
        """The squared norm without computing it: unknown."""
        return None

    def squared_norm(self) -> torch.Tensor | float:
        """Return the squared norm over all gradients in float64."""
        return squared_norm(self.flats)

    def agree_on_order(self, group: Group) -> None:
        """Take over the order in which gradients have arrived on the lowest rank that has a share, from the next step.

        Every rank has to call this after the same committed step.

        Raises:
            PeerLost: the group is broken.
        """
        self.wants_order = False
        position_of = {id(parameter): position for position, parameter in enumerate(self.model.parameters())}
        arrived = [position_of[key] for key in self._arrived if key in position_of]
        buckets = [[position_of.get(id(p), -1) for p in bucket.parameters] for bucket in self._buckets]
        own: Sequence[int] | None = None
        if not arrived or not leave_in_order(buckets, arrived):
            rest = [position for bucket in buckets for position in bucket if position not in set(arrived)]
            own = arrived + rest if arrived else ()
        self._take_order(share_order(group, own) or self.order)

    def rest(self) -> None:
        """Leave the parameters alone until the next ``begin``, while pieces of the model are reduced instead."""
        self.abandon()
        if self._hooks is not None:
            self._hooks.end()
        self._unwatch()
        self._trainable = None

    def form(self, group: Group) -> None:
        """Start a formation with one order on all ranks.

        Raises:
            PeerLost: the group is broken.
        """
        self._take_order(share_order(group, self.order) or ())
        self.wants_order = True  # ranks do not know what others have tried in earlier formations

    # -- internals ---------------------------------------------------------------------------------------------------

    def _take_order(self, order: tuple[int, ...]) -> None:
        if order != self.order:
            self.order, self._trainable = order, None  # the next step builds the buckets again

    def _build(self) -> None:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError(
                "the model has no parameter that requires a gradient, so nothing can be trained. "
                "Call requires_grad_() on the parameters to train."
            )
        if self._hooks is not None:
            self._hooks.end()
        self._unwatch()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None  # an optimizer may still have it, though it is frozen or no longer in the model
        self.timeline = timeline_of(trainable[0].device)
        every = {id(parameter): position for position, parameter in enumerate(self.model.parameters())}
        places = {position: place for place, position in enumerate(self.order)}
        place_of = {key: places[position] for key, position in every.items() if position in places}
        self.wants_order = self.wants_order or any(id(parameter) not in place_of for parameter in trainable)
        self._buckets = buckets_of(arrange(trainable, place_of), enough_bytes=self.bucket_bytes)
        if self.make_compressor is not None:
            for bucket in self._buckets:
                bucket.compressor = self.make_compressor()
        self._view_of = {
            id(p): view for bucket in self._buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._hooks = GradientHooks(self._buckets, arrive=self._arrive, move=self._move, close=self._close)
        self.elements = sum(bucket.flat.numel() for bucket in self._buckets)
        self._is_late = gate.runs_behind(self.flats)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        layout = [
            [
                (names[id(p)], tuple(p.shape), order_of(view), str(p.dtype))
                for p, view in zip(bucket.parameters, bucket.views, strict=True)
            ]
            for bucket in self._buckets
        ]
        self._signature, self._is_new = zlib.crc32(repr(layout).encode()), True

    def _unwatch(self) -> None:
        for watcher in self._watchers:
            watcher.remove()
        self._watchers.clear()

    def _require_hooks(self) -> GradientHooks:
        if self._hooks is None:
            raise UsageError("call reducer.begin() before a backward pass")
        return self._hooks

    def _arrive(self, parameter: torch.nn.Parameter, bucket: Bucket) -> None:
        """Move one gradient into its bucket; send complete buckets."""
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
        if parameter.grad is not view:  # the step's first gradient, or one that was replaced instead of added to
            self._moved.add(id(parameter))
            if parameter.grad is not None:
                check_dense(parameter.grad)
                view.copy_(parameter.grad)
            parameter.grad = view

    def _close(self, bucket: Bucket) -> None:
        """Move all gradients of a bucket together, now that its last one should have arrived; send complete buckets."""
        if not self._armed or not bucket.missing:
            return
        if not bucket.take():
            self._require_hooks().surprised()  # ``flush`` completes the bucket
            return
        bucket.missing = 0
        self._launch_complete()

    def _launch_complete(self) -> None:
        while not self._held and self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.started = self.timeline.now()
        bucket.version = bucket.flat._version  # noqa: SLF001  # torch's own count of changes; views share it
        if self.timestamps.first_bucket is None:
            self.timestamps.first_bucket = bucket.started
        if self._on_launch is not None:
            self._on_launch(bucket)
        if self._group is None or self._group.world_size == 1:
            return
        is_last = self._next == len(self._buckets)
        bucket.packed = bucket.compressor.pack(bucket.flat) if bucket.compressor is not None else None
        bucket.work = self._group.all_reduce(bucket.flat if bucket.packed is None else bucket.packed)
        if is_last or bucket.work.is_timed:
            return  # gloo's thread would wait for the interpreter lock; ``wait`` records the last bucket's end

        def note(_future: object) -> None:
            bucket.done = self.timeline.now()

        bucket.work.get_future().add_done_callback(note)

    def _unpack(self, bucket: Bucket, group: Group) -> None:
        if bucket.compressor is None:
            return
        if bucket.packed is not None:
            if bucket.compressor.unpack(bucket.packed, bucket.flat):
                return
            group.wait(group.all_reduce(bucket.flat))  # every rank sees the same overflow
        bucket.compressor.learn(bucket.flat)
