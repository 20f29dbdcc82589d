"""Gradient buckets: gradients are summed over ranks while backward still runs.

Each parameter's gradient is a view into the flat buffer of its bucket. When the last gradient of a bucket has arrived in
the last micro-batch, the bucket's all-reduce starts; buckets start in the same order on every rank. The losses are scaled
before backward so that the plain sum over ranks is the gradient of the global batch: ``g = sum_i (n_i / sum n) g_i``.

Why not DistributedDataParallel: it belongs to one process group, needs the user's forward pass on a rank without samples,
and hides its buffers; this outlives formations, and the wrapped model stays the user's own (docs/adr).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from heterotrain.errors import UsageError
from heterotrain.group import Group, settle

MIB = 1024 * 1024


@dataclass(slots=True, eq=False)
class Bucket:
    """Some parameters and the flat buffer that holds their gradients."""

    flat: torch.Tensor
    parameters: list[torch.nn.Parameter]
    views: list[torch.Tensor]
    missing: int = 0
    work: dist.Work | None = None
    started_s: float = math.nan
    done_s: float = math.nan


@dataclass(slots=True)
class Timing:
    """Moments of one step's last backward pass, in ``time.perf_counter`` seconds."""

    backward_began_s: float = math.nan
    first_bucket_s: float = math.nan
    backward_ended_s: float = math.nan
    buckets_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Reducer:
    """Buckets over a model's parameters; knows nothing of steps or plans."""

    model: torch.nn.Module
    bucket_bytes: int
    timing: Timing = field(default_factory=Timing)
    _buckets: list[Bucket] = field(default_factory=list)
    _bucket_of: dict[int, Bucket] = field(default_factory=dict)
    _arrived: set[int] = field(default_factory=set)
    _signature: tuple[bool, ...] = ()
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _group: Group | None = None
    _armed: bool = False
    _next: int = 0
    _on_launch: Callable[[torch.Tensor], None] | None = None

    @property
    def flats(self) -> list[torch.Tensor]:
        """The flat gradient buffers, in the order in which they are reduced."""
        return [bucket.flat for bucket in self._buckets]

    def begin(self) -> None:
        """Start a step with zero gradients; notices parameters that were frozen or thawed since."""
        signature = tuple(p.requires_grad for p in self.model.parameters())
        if signature != self._signature:
            self._build()
            self._signature = signature
        self.abandon()
        for bucket in self._buckets:
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    def arm(self, group: Group | None, *, on_launch: Callable[[torch.Tensor], None] | None = None) -> None:
        """Let the next backward pass start the reductions over ``group`` (``None``: this rank is alone).

        ``on_launch`` sees each flat buffer before it is reduced.
        """
        self._group, self._armed, self._next, self._on_launch = group, True, 0, on_launch
        self._arrived.clear()
        self.timing = Timing(backward_began_s=time.perf_counter())
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work, bucket.started_s, bucket.done_s = None, math.nan, math.nan

    def flush(self) -> None:
        """Start what is left after backward: buckets of parameters that got no gradient."""
        self.timing.backward_ended_s = time.perf_counter()
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
        for bucket in self._buckets:
            if bucket.work is not None:
                self._group.wait(bucket.work)
        self.timing.buckets_s = self._transfers()
        for bucket in self._buckets:
            bucket.work = None

    def abandon(self) -> None:
        """Forget a step that failed; returns when its operations have let go of the buffers (cut the group before)."""
        settle([bucket.work for bucket in self._buckets if bucket.work is not None])
        for bucket in self._buckets:
            bucket.work = None
        self._armed = False

    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm over all gradients as a float64 scalar."""
        return squared_norm(self.flats)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._buckets, self._bucket_of = [], [], {}
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if not trainable:
            raise UsageError("the model has no parameter that requires a gradient: nothing can be trained")
        # Backward reaches the last layers first: their bucket can start while the rest is still being computed.
        for parameters in _cut(list(reversed(trainable)), self.bucket_bytes):
            first = parameters[0]
            flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
            views, offset = [], 0
            for parameter in parameters:
                views.append(flat[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()
            bucket = Bucket(flat=flat, parameters=parameters, views=views)
            self._buckets.append(bucket)
            for parameter in parameters:
                self._bucket_of[id(parameter)] = bucket
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._armed:
            return
        if id(parameter) in self._arrived:
            raise UsageError(
                "a parameter got its gradient twice in one backward pass: use step.backward once for each micro-batch, "
                "and checkpoint activations with use_reentrant=False"
            )
        self._arrived.add(id(parameter))
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        bucket.started_s = time.perf_counter()
        if math.isnan(self.timing.first_bucket_s):
            self.timing.first_bucket_s = bucket.started_s
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view:  # something replaced the gradient instead of adding to it
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                parameter.grad = view
        if self._on_launch is not None:
            self._on_launch(bucket.flat)
        if self._group is None or self._group.world_size == 1:
            return

        def note(_future: object) -> None:
            bucket.done_s = time.perf_counter()

        bucket.work = self._group.all_reduce(bucket.flat)
        bucket.work.get_future().add_done_callback(note)

    def _transfers(self) -> tuple[float, ...]:
        """Return each bucket's transfer seconds; time in which an earlier bucket still used the wire is not its own."""
        seconds, free_s, now_s = [], -math.inf, time.perf_counter()
        for bucket in self._buckets:
            done_s = now_s if math.isnan(bucket.done_s) else bucket.done_s  # the note may come after the wait returned
            seconds.append(max(0.0, done_s - max(bucket.started_s, free_s)))
            free_s = max(free_s, done_s)
        return tuple(seconds)


def squared_norm(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of all buffers as a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=flats[0].device)
    for flat in flats:
        total += torch.dot(flat, flat)
    return total


def _cut(parameters: list[torch.nn.Parameter], limit_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Cut the list into runs of one dtype and device with at most ``limit_bytes`` (a larger parameter stands alone)."""
    runs: list[list[torch.nn.Parameter]] = []
    used = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        same = bool(runs) and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device)
        if not same or used + size > limit_bytes:
            runs.append([])
            used = 0
        runs[-1].append(parameter)
        used += size
    return runs
