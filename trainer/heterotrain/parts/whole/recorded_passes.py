"""The passes of a model on tensors that stay in their place, looked at once and then recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from heterotrain.data.rng import seeded_rng
from heterotrain.errors import UsageError
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.parts.whole.recording import WARM_UPS, Recorder, Recording

CONSTANTS = (type(None), bool, int, float, str)
"""Kinds of arguments and results, besides tensors, that a recording keeps as they are."""


class UnfitPass(Exception):  # noqa: N818  # names the event; it never leaves this package
    """The passes cannot be recorded for a reason that is in the text, and run eagerly."""


@contextmanager
def unchanged(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Let passes in the block leave no trace: values and objects of buffers, weights, and random numbers."""
    places = [(layer._buffers, dict(layer._buffers)) for layer in model.modules()]  # noqa: SLF001  # as state/layers.py
    tensors = [tensor.data for tensor in (*model.parameters(), *model.buffers())]  # whose changes torch does not count
    before = [tensor.clone() for tensor in tensors]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), seeded_rng(0):
        try:
            yield
        finally:
            for buffers, kept in places:
                buffers.update(kept)
            torch._foreach_copy_(tensors, before)


class PlacedPasses:
    """The passes of a model for one form of the inputs, on tensors of their own that stay in their place."""

    def __init__(
        self, model: torch.nn.Module, forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec
    ) -> None:
        """Take the form.

        Args:
            model: the model.
            forward: its forward pass without recordings.
            leaves: arguments of a call.
            spec: their structure.
        """
        self._leaves, self._spec, self._body = leaves, spec, _Body(model, forward)
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # Own leaves of the parameters' memory: without their hooks, and with no node of an earlier graph.
        self._own = {f"model.{name}": each.detach().requires_grad_() for name, each in self.parameters.items()}
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in tensors_in(leaves)]
        self.wanted = [*(each for each in self.inputs if each.requires_grad), *self._own.values()]
        self.incoming: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def result(self) -> Any:
        """Run the forward pass; return what the model returns."""
        given, kind = iter(self.inputs), next(iter(self.parameters.values())).device.type
        args, kwargs = tree_unflatten([next(given) if is_tensor(leaf) else leaf for leaf in self._leaves], self._spec)
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # In a layer that is used in two places, ``functional_call`` would leave its tensors.
        places = [(layer._parameters, dict(layer._parameters)) for layer in self._body.modules()]  # noqa: SLF001  # as above
        try:
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
                return torch.func.functional_call(self._body, self._own, args, kwargs)
        finally:
            for parameters, kept in places:
                parameters.update(kept)

    def run_forward(self) -> list[torch.Tensor]:
        """Run the forward pass; return its tensors."""
        self._outputs = tensors_in(tree_flatten(self.result())[0])
        return list(self._outputs)

    def run_backward(self) -> list[torch.Tensor | None]:
        """Run the backward pass of the newest forward pass; return what ``wanted`` gets, ``None`` if it is not used."""
        trained = [each for each in self._outputs if each.requires_grad]
        self._outputs = []
        return list(torch.autograd.grad(trained, self.wanted, self.incoming, allow_unused=True))


def record(passes: PlacedPasses, found: Sequence[Any], spec: TreeSpec, recorder: Recorder) -> Recording:
    """Record a pair of passes.

    Args:
        passes: the passes.
        found: values of the model's result.
        spec: its structure.
        recorder: records them.

    Raises:
        UsageError: an operation cannot be recorded.
    """
    places = [is_tensor(leaf) for leaf in found]
    constants = [None if is_tensor(leaf) else leaf for leaf in found]

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(tensors)
        return tree_unflatten(
            [next(given) if is_one else value for is_one, value in zip(places, constants, strict=True)], spec
        )

    is_trained = [each.requires_grad for each in tensors_in(found)]
    passes.incoming = [torch.zeros_like(each) for each in tensors_in(found) if each.requires_grad]
    with recorder.aside():
        for _ in range(WARM_UPS):
            passes.run_forward()
            passes.run_backward()
    try:
        (outputs, forward), (gradients, backward) = recorder.record(passes.run_forward, passes.run_backward)
    except RuntimeError as error:
        if out_of_memory(error) is not None:
            raise
        raise UsageError(
            "job.wrap: graphs=True cannot record this model, whose passes may read a value back from the device or "
            f"depend on one: leave it out ({error})"
        ) from error
    return Recording(
        inputs=passes.inputs,
        parameters=list(passes.parameters.values()),
        is_trained=is_trained,
        outputs=[each.detach() for each in outputs],
        incoming=passes.incoming,
        gradients=gradients,
        run_forward=forward,
        run_backward=backward,
        rebuild=rebuild,
    )


class _Body(torch.nn.Module):
    """Calls a model's own forward pass, without its hooks, which run around the recordings."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._run = model, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result."""
        return self._run(*args, **kwargs)


def looked_at(model: torch.nn.Module, kind: str, passes: PlacedPasses) -> Any:
    """Return a model's result, from a forward pass that is looked at; ``kind`` is that of its device.

    Raises:
        UnfitPass: it does what a recording would not repeat.
    """
    for name, layer in model.named_modules():
        hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values(), *layer._backward_hooks.values())  # noqa: SLF001  # torch has no public list of them
        if layer is not model and not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            raise UnfitPass(f"layer {name!r} has hooks")
    buffers, drawn = list(map(id, model.buffers())), _host_draws(kind)
    found = passes.result()
    if _host_draws(kind) != drawn:
        raise UnfitPass("its forward pass draws random numbers on the host")
    if list(map(id, model.buffers())) != buffers:
        raise UnfitPass("its forward pass puts other tensors in the place of buffers")
    for name, layer in model.named_modules():
        kept = () if layer._forward_pre_hooks else tensors_in(tree_flatten(vars(layer))[0])  # noqa: SLF001  # as above
        if any(each.grad_fn is not None for each in kept):
            raise UnfitPass(f"layer {name!r} keeps results of the pass")
    wanted = set(map(id, passes.wanted))
    if any(id(leaf) not in wanted for leaf in _leaves_of(tree_flatten(found)[0])):
        raise UnfitPass("gradients flow to tensors that are not its parameters, or are kept outside of its layers")
    return found


def _host_draws(kind: str) -> tuple[Any, ...]:
    """Return the states of the host's generators; torch's own for processors is the device's where that is one."""
    numpys = np.random.get_state()  # noqa: NPY002  # scripts draw from this global generator
    torchs = b"" if kind == "cpu" else torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), numpys[1].tobytes(), numpys[2], torchs  # type: ignore[index]  # the legacy form


def _leaves_of(found: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors to which gradients flow from some outputs."""
    outputs, seen = tensors_in(found), set()
    yield from (each for each in outputs if each.requires_grad and each.grad_fn is None)
    waiting: list[Any] = [each.grad_fn for each in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [other for other, _ in node.next_functions]


def is_tensor(leaf: object) -> bool:
    """Return whether this is a tensor."""
    return isinstance(leaf, torch.Tensor)


def tensors_in(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among some values."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
