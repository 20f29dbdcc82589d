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

from collections.abc import Callable

import torch

from heterotrain.errors import UsageError
from heterotrain.exchange import gate
from heterotrain.exchange.flat.bucket_order import BucketOrder
from heterotrain.exchange.flat.buckets import WholeBucket, buckets_of, check_dense, signature_of, squared_norm
from heterotrain.exchange.flat.exchange import FlatExchange
from heterotrain.exchange.flat.gradient_hooks import GradientHooks, GradientWatchers
from heterotrain.exchange.interface import Exchange, Gradients
from heterotrain.exchange.refusals import CHANGED, CLEARED, THAWED, TWICE
from heterotrain.exchange.script_hooks import ScriptHooks
from heterotrain.exchange.timeline import timeline_of
from heterotrain.network.group import Group
from heterotrain.state.finite import all_finite
from heterotrain.state.layers import Layers
from heterotrain.state.strides import Strides, laid_out_like


class Reducer(Gradients):
    """The buckets of a model's parameters; independent of steps and plans.

    Attributes:
        model: the model.
        bucket_bytes: a bucket ends as soon as it holds this much.
        on_change: called when trainable parameters have been added, replaced, frozen or unfrozen, before a step.
        buckets: in the order in which they are reduced.
        flats: their buffers.
        parameters: number of parameters in the buckets.
        signature: of names, shapes, strides and formats of the parameters in the buckets.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        bucket_bytes: int,
        exchange: Exchange | None = None,
        on_change: Callable[[], None] | None = None,
        is_measurable: bool = True,
    ) -> None:
        """See the class; without an ``exchange``, a flat one."""
        self.model, self.bucket_bytes = model, bucket_bytes
        self.on_change, self.is_measurable = on_change, is_measurable
        self.exchange: Exchange = exchange or FlatExchange()
        self.buckets: list[WholeBucket] = []
        self.flats: list[torch.Tensor] = []
        self.elements = self.parameters = self.signature = 0
        self.script_hooks = ScriptHooks()
        self._order = BucketOrder(model)
        self._view_of: dict[int, torch.Tensor] = {}
        self._strides = Strides(())
        self._layers = Layers(model)
        self._trainable: list[int] | None = None
        self._hooks = self._new_hooks()
        self._watchers = GradientWatchers()
        self._arrived: dict[int, torch.nn.Parameter] = {}
        self._moved: set[int] = set()
        self._is_complete = self._is_late = self._armed = self._gives_way = False
        self._group: Group | None = None
        self._on_complete: Callable[[WholeBucket], None] | None = None

    @property
    def wants_order(self) -> bool:
        """Whether the ranks should agree on the order of buckets after the next committed step."""
        return self._order.is_wanted

    def begin(self, *, micro_batches: int = 1) -> None:
        """Start a step without gradients; takes account of parameters that were frozen or unfrozen since the last one.

        Args:
            micro_batches: backward passes that this rank adds up in the step.

        Raises:
            UsageError: no parameter of the model can be trained.
        """
        self.abandon()
        trainable = self._layers.trainable_ids()
        if trainable != self._trainable or self._strides.have_changed():
            self._build()
            self._trainable = trainable
            if self.on_change is not None:
                self.on_change()
        self._moved.clear()
        self._is_complete = self._gives_way = False
        if self._watchers.ids:
            self._watchers.rest()
        self._on_complete = None
        hooks = self._hooks
        hooks.begin(one_micro_batch=micro_batches <= 1)
        own = hooks.ids | self._watchers.ids if self._watchers.ids else hooks.ids
        for bucket in self.buckets:
            for parameter, view, pointer in zip(bucket.parameters, bucket.views, bucket.pointers, strict=True):
                if view.data_ptr() != pointer:
                    bucket.reclaim()
                parameter.grad = None
                tensor_hooks, other_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001  # torch has no public list of them
                if (tensor_hooks and not tensor_hooks.keys() <= own) or (other_hooks and not other_hooks.keys() <= own):
                    self.script_hooks.rest(parameter, own)

    def watch(self, on_gradient: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Call ``on_gradient`` with each parameter and each new gradient of a backward pass, until the next step."""
        self._watchers.watch(on_gradient, [p for bucket in self.buckets for p in bucket.parameters])

    def watch_buckets(self, on_complete: Callable[[WholeBucket], None]) -> None:
        """Call ``on_complete`` with each bucket before it is added up, until the next step."""
        self._on_complete = on_complete

    def give_way(self, group: Group) -> bool:
        """Start buckets after the backward pass only, so that layers can add up in it over the same connections.

        Ranks start layers' sums in the same order, but not always in the same places among the buckets: one without
        samples has none, and a gradient may be missing.

        Returns:
            Whether layers may; the same on all ranks.
        """
        self._gives_way = self.exchange.is_known_to(group)
        return self._gives_way

    def arm(self, group: Group | None) -> None:
        """Let the next backward pass, the step's last, start the reductions over ``group`` (``None``: no peers)."""
        self.exchange.begin(group)
        self._group, self._armed = group, True
        self._arrived.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.is_finite = len(bucket.parameters), None
            bucket.unused.clear()

    def flush(self) -> None:
        """Start the buckets that are left after backward, because some parameters got no gradient.

        Raises:
            UsageError: a gradient arrived after its bucket had been sent.
        """
        if self._armed:
            for bucket in self.buckets[: self.exchange.started]:
                if bucket.flat._version != bucket.version:  # noqa: SLF001  # as in _send
                    raise UsageError(TWICE)
            if self._arrived:
                self._hooks.learn(list(self._arrived.values()))
        self._armed, self._is_complete = False, True
        for bucket in self.buckets[self.exchange.started :]:
            bucket.complete()
            self._send(bucket)

    def remember(self) -> None:
        """Record the gradients' versions after a backward pass that is not the step's last."""
        for bucket in self.buckets:
            bucket.version = bucket.flat._version  # noqa: SLF001  # as in _send

    def check_untouched(self) -> None:
        """Check that nothing has changed the gradients since the last backward pass.

        Raises:
            UsageError: something has, or other parameters can be trained now.
        """
        for bucket in self.buckets:
            if bucket.flat._version != bucket.version:  # noqa: SLF001  # as in _send
                raise UsageError(CHANGED)
            for parameter, view, pointer in zip(bucket.parameters, bucket.views, bucket.pointers, strict=True):
                is_other = parameter.grad is not view and (self._is_complete or id(parameter) in self._moved)
                if is_other or view.data_ptr() != pointer:
                    raise UsageError(CHANGED)
        if self._layers.trainable_ids(look=False) != self._trainable:
            raise UsageError(THAWED)

    @property
    def unused(self) -> int:
        """The parameters that got no gradient on this rank in this step: bit i stands for the i-th in the buckets."""
        found = first = 0
        for bucket in self.buckets:
            for place in bucket.unused:
                found |= 1 << (first + place)
            first += len(bucket.parameters)
        return found

    def drop_unused(self, unused: int) -> None:
        """Leave parameters that no rank has used without a gradient, so that the optimizer does not touch them.

        Args:
            unused: those that are ``unused`` on every rank.
        """
        first = 0
        for bucket in self.buckets:
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
        for bucket in self.buckets:
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
        for bucket in self.buckets:
            changed = bucket.reclaim() or changed or bucket.flat._version != bucket.version  # noqa: SLF001  # as in _send
            bucket.forget()
            for place, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                gradient = parameter.grad
                if gradient is view or (gradient is None and place in bucket.unused):
                    continue
                if gradient is not None:
                    view.copy_(gradient)
                    parameter.grad = view
                else:
                    view.zero_()
                changed = True
        return changed

    def wait(self) -> None:
        """Wait until every bucket is reduced.

        Raises:
            PeerLost: the group is broken.
        """
        for bucket in self.exchange.finish():
            if isinstance(bucket, WholeBucket) and bucket.flat.is_cpu:  # while later buckets travel
                bucket.look()

    def abandon(self) -> None:
        """Drop a failed step; waits until its operations have released the buffers (cut the group first)."""
        self.exchange.abandon()
        self._armed = False
        if self.script_hooks.resting:
            self.script_hooks.wake()

    def is_finite(self) -> bool:
        """Return whether every element is finite; after the reduction this is the same on all ranks."""
        if self._is_late:
            return all_finite(self.flats)
        return all(map(WholeBucket.look, self.buckets))

    def lay_out(self) -> None:
        """Give gradients and optimizer state the strides of parameters, where the script has replaced either."""
        is_new = self._strides.have_changed()
        for bucket in self.buckets:
            for parameter, view, pointer in zip(bucket.parameters, bucket.views, bucket.pointers, strict=True):
                gradient = parameter.grad
                if gradient is not None and (is_new or gradient is not view or view.data_ptr() != pointer):
                    parameter.grad = laid_out_like(gradient, parameter)
        if is_new:
            self._trainable = None  # the next step builds the buckets again
            if self.on_change is not None:
                self.on_change()

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

    def squared_norm(self) -> torch.Tensor | float:
        """Return the squared norm over all gradients in float64."""
        known = [bucket.squared for bucket in self.buckets]
        return squared_norm(self.flats) if None in known else sum(filter(None, known))

    def scale(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        known = [bucket.squared for bucket in self.buckets]
        super().scale(factor)
        for bucket, squared in zip(self.buckets, known, strict=True):
            bucket.scaled(squared, factor)

    def agree_on_order(self, group: Group) -> None:
        """Take over the order in which gradients have arrived on the lowest rank that has a share, from the next step.

        Every rank has to call this after the same committed step.

        Raises:
            PeerLost: the group is broken.
        """
        if self._order.agree(group, self.buckets, self._arrived):
            self._trainable = None  # the next step builds the buckets again

    def rest(self) -> None:
        """Leave the parameters alone until the next ``begin``, while pieces of the model are reduced instead."""
        self.abandon()
        self._hooks.end()
        self._watchers.end()
        self._trainable = None

    def form(self, group: Group) -> None:
        """Start a formation with one order on all ranks.

        Raises:
            PeerLost: the group is broken.
        """
        if self._order.form(group):
            self._trainable = None

    # -- internals ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError(
                "the model has no parameter that requires a gradient, so nothing can be trained. "
                "Call requires_grad_() on the parameters to train."
            )
        self._hooks.end()
        self._watchers.end()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None  # an optimizer may still have it, though it is frozen or no longer in the model
        self.buckets = buckets_of(self._order.arranged(trainable), enough_bytes=self.bucket_bytes)
        self.flats = [bucket.flat for bucket in self.buckets]
        self.exchange.use(self.buckets, timeline_of(trainable[0].device))
        self._view_of = {
            id(p): view for bucket in self.buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        self._hooks = self._new_hooks()
        self._strides = Strides(trainable)
        self.parameters, self.elements = len(self._view_of), sum(flat.numel() for flat in self.flats)
        self._is_late = gate.runs_behind(self.flats)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.signature = signature_of(self.buckets, names)

    def _new_hooks(self) -> GradientHooks:
        return GradientHooks(self.buckets, arrive=self._arrive, move=self._move, close=self._close)

    def _arrive(self, bucket: WholeBucket, parameter: torch.nn.Parameter) -> None:
        """Move one gradient into its bucket; send complete buckets."""
        if parameter.grad is None:
            return  # a function of autograd has returned none for it; the buffer may hold that of the step before
        self._move(parameter)
        if not self._armed:
            return
        if id(parameter) in self._arrived:
            raise UsageError(TWICE)
        self._arrived[id(parameter)] = parameter
        bucket.missing -= 1
        if not (bucket.missing or self._gives_way):
            self._send(bucket)

    def _move(self, parameter: torch.nn.Parameter) -> None:
        view, gradient = self._view_of[id(parameter)], parameter.grad
        if gradient is not None and gradient is not view:  # the step's first, or replaced instead of added to
            self._moved.add(id(parameter))
            check_dense(gradient)
            view.copy_(gradient)
            parameter.grad = view

    def _close(self, bucket: WholeBucket, last: torch.nn.Parameter) -> None:
        """Move all gradients of a bucket together, now that its last one should have arrived; send complete buckets."""
        if last.grad is None or not self._armed or not bucket.missing:
            return
        if not bucket.take():
            self._hooks.surprised()  # ``flush`` completes the bucket
            return
        bucket.missing = 0
        if not self._gives_way:
            self._send(bucket)

    def _send(self, bucket: WholeBucket) -> None:
        """Hand over a bucket that has all of its gradients."""
        bucket.version = bucket.flat._version  # noqa: SLF001  # torch's own count of changes; views share it
        if self._on_complete is not None and not bucket.is_complete:
            self._on_complete(bucket)
        self.exchange.start(bucket)
