"""One recording of a model's forward and backward pass: operations that are queued again, in the same memory.

A recorder runs operations once and returns what runs them again. ``CudaRecorder`` records CUDA graphs. What is here
makes them one function of autograd. The recorded tensors are parameters and buffers of the model, which are read and
written where they are, and copies of the inputs. Outputs and gradients are copies again, because the next run
overwrites those of the recording.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from heterotrain.errors import UsageError

Run = Callable[[], list[Any]]
"""Runs operations on a device; returns tensors, or ``None`` in the place of some."""
Replay = Callable[[], object]
"""Runs the same operations again: the tensors that the first run returned get new values."""

WARM_UPS = 3
"""Passes before a recording, as many as ``torch.cuda.make_graphed_callables`` makes: libraries choose kernels."""

TWICE = (
    "a backward pass ran twice through one forward pass of a model with job.wrap(graphs=True), whose activations are "
    "gone after the first: leave out graphs=True, or retain_graph"
)


class Recorder(ABC):
    """Runs operations once, and later again into the same memory."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """Run passes in the block where recordings will be made."""

    @abstractmethod
    def record(self, *runs: Run) -> list[tuple[list[Any], Replay]]:
        """Record functions, in the order in which they will be run again; return what each returned, and its replay.

        Raises:
            RuntimeError: an operation cannot be recorded, such as one that waits for the device.
        """


class CudaRecorder(Recorder):
    """CUDA graphs. Those of one call have a memory pool of their own, so recordings can run in any order."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block on the stream of the recordings: libraries keep workspaces for each stream."""
        self._stream = self._stream or torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def record(self, *runs: Run) -> list[tuple[list[Any], Replay]]:
        """Capture one graph for each function; other threads, such as NCCL's, may go on meanwhile."""
        pool, found = torch.cuda.graph_pool_handle(), list[tuple[list[Any], Replay]]()
        for run in runs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                results = run()
            found.append((results, graph.replay))
        return found


class _Token:
    """Lives as long as the backward pass of a forward pass may come."""


@dataclass(slots=True, eq=False, kw_only=True)
class Recording:
    """Forward and backward pass for one form of the inputs.

    Attributes:
        inputs: where the inputs are copied.
        parameters: the model's parameters that get gradients.
        outputs: of the forward pass.
        is_trained: of each output, whether the backward pass begins there.
        incoming: where gradients of the trained outputs are copied.
        gradients: of the inputs that require them, and of the parameters; ``None`` for one that is not used.
        run_forward: runs the forward pass again.
        run_backward: runs the backward pass again.
        rebuild: makes the model's result of its tensors.
        kept: the memory that the recording reads and writes, so that it is given to nothing else.
    """

    inputs: list[torch.Tensor]
    parameters: list[torch.nn.Parameter]
    outputs: list[torch.Tensor]
    is_trained: list[bool]
    incoming: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    run_forward: Replay
    run_backward: Replay
    rebuild: Callable[[Sequence[torch.Tensor]], Any]
    kept: list[torch.Tensor] = field(default_factory=list)
    _pending: weakref.ref[_Token] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a backward pass may still come, which needs the activations of the newest forward pass."""
        return self._pending is not None and self._pending() is not None

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the model's result for these inputs."""
        return self.rebuild(_Replay.apply(self, *tensors, *self.parameters))

    def begin(self, token: _Token) -> None:
        """Run the forward pass; its activations are needed until ``token`` is dropped, or ``end``."""
        self._pending = weakref.ref(token)
        self.run_forward()

    def end(self) -> None:
        """Run the backward pass."""
        self._pending = None
        self.run_backward()


class _Replay(torch.autograd.Function):
    """Runs a recording; a backward pass that comes a second time is refused."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recording, ctx.token = recording, _Token()
        for place, given in zip(recording.inputs, tensors, strict=False):
            place.copy_(given)
        recording.begin(ctx.token)
        found = tuple(output.clone() for output in recording.outputs)
        ctx.mark_non_differentiable(
            *[output for output, trained in zip(found, recording.is_trained, strict=True) if not trained]
        )
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recording: Recording = ctx.recording
        if ctx.token is None:
            raise UsageError(TWICE)
        ctx.token = None
        given = [each for each, trained in zip(gradients, recording.is_trained, strict=True) if trained]
        for place, gradient in zip(recording.incoming, given, strict=True):
            place.copy_(gradient)
        recording.end()
        found = _copies(recording.gradients)
        own = [next(found) if each.requires_grad else None for each in recording.inputs]
        return None, *own, *found


def _copies(tensors: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Yield copies, made in one operation: a script may keep or add up what the next run overwrites."""
    known = [each for each in tensors if each is not None]
    copies = [torch.empty_like(each) for each in known]
    torch._foreach_copy_(copies, known)
    made = iter(copies)
    return (None if each is None else next(made) for each in tensors)
