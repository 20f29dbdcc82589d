"""The objects and functions that a script registers with its job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from heterotrain.errors import UsageError
from heterotrain.keywords import known_keywords
from heterotrain.model_setup import ModelSetup, WrapOptions
from heterotrain.numerics.fused import lay_out, prefer_fused
from heterotrain.numerics.method import Numerics
from heterotrain.parts.interface import Wrapped
from heterotrain.state import admission
from heterotrain.state.tensors import Stateful
from heterotrain.state.training import TrainState
from heterotrain.steps.hooks import EpochHook, Hooks, StepsHook
from heterotrain.steps.leadership import LeaderHook, Leadership
from heterotrain.steps.loop import Loop

_S = TypeVar("_S", bound=Stateful)


class RegisteredObjects:
    """A job's side for what a script registers: the model, what trains it, further state, and hooks."""

    _training: TrainState
    _numerics: Numerics
    _wrapped: Wrapped
    _hooks: Hooks
    _leadership: Leadership
    _loop: Loop
    _setup: ModelSetup

    @known_keywords
    def wrap(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        *,
        units: str | None = None,
        checkpoint_units: bool = False,
        compile_units: bool = False,
        keep_gathered: bool = False,
        offload: bool = False,
        graphs: bool = False,
        weights: str | os.PathLike[str] | None = None,
    ) -> torch.nn.Module:
        """Move the model to the device and return it; from now on its gradients are those of the global batch.

        BatchNorm layers stay the same objects, but take their statistics over the global batch, unless ``init`` got
        ``batch_norm="local"``.

        With parallelism Sharded, the ranks of a worker divide the model among themselves. Parameters are then new
        objects, so make the optimizer from the returned model. It can be run inside ``with step:`` and in hooks only,
        by all ranks alike.

        A function is called on the meta device, and each layer's ``reset_parameters`` gives it initial values, drawn
        by the job's seed and the layer's name. The model has to be a sequence of units: a ``torch.nn.Sequential``, or
        with ``units``.

        Args:
            model: the model, the same on every rank, or a function that builds it.
            units: name of the model's list of layers, such as ``blocks`` or ``transformer.h``: a divided model is
                gathered one of these layers at a time. In ``step.compute``, each of them draws its own random numbers,
                the same for any division of the units among devices.
            checkpoint_units: compute the activations of each unit again in the backward pass, which saves memory.
            compile_units: compile the forward pass of each unit (``torch.compile``).
            keep_gathered: keep the parameters of a divided unit between its forward and backward pass, which saves
                messages and costs memory.
            offload: keep a divided model's parameters, gradients and optimizer state in the host's memory. Where a rank
                holds the whole model, this has no effect, and a warning says so; the same for ``keep_gathered``, also
                in stages. A model that is cut into stages cannot be offloaded.
            graphs: run forward and backward passes of a small model as CUDA graphs, which cost the host less. Each size
                of a micro-batch is recorded when it comes for the second time, up to 8 sizes. What the model does in
                Python is then done in recordings only: its control flow must not depend on values of tensors. On a
                CPU this has no effect.
            weights: path or URI of initial values for a model that a function builds: a safetensors file, an index of
                several, a folder with either, or a ``state_dict`` of ``torch.save`` on a local disk. Names are those of
                the model. Each rank reads only what it holds. A checkpoint of the job takes precedence.

        Raises:
            UsageError: this is not a model or it cannot be trained this way, ``wrap`` was called before, the model
                has an unknown kind of BatchNorm layer, there is no such list, a layer has no initial values, the
                weights do not fit the model, stages would be offloaded, or graphs cannot record the model: it is
                divided, compiled, or has BatchNorm over the global batch.
        """
        options = WrapOptions(
            checkpoint_units=checkpoint_units, compile_units=compile_units, keep_gathered=keep_gathered,
            offload=offload, graphs=graphs, weights=None if weights is None else os.fspath(weights),
        )  # fmt: skip
        return self._setup.wrap(model, units, options)

    def optimizer(
        self, optimizer: torch.optim.Optimizer | Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Return the optimizer; from now on its state is sent to joining ranks and saved in checkpoints.

        SGD, Adam and AdamW of torch get ``fused=True`` where the script chooses neither ``fused`` nor ``foreach`` and
        every parameter allows it: a CPU reads its memory once, and a GPU need not wait for the host before the update.

        Args:
            optimizer: the optimizer, or a function that makes it from the parameters that this rank holds.

        Raises:
            UsageError: this is not an optimizer, it needs a closure, or the learning-rate rule is adascale and does not
                support this kind of optimizer; or a function came before ``job.wrap``.
        """
        if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
            if self._training.model is None:
                raise UsageError("call job.wrap(model) before job.optimizer: its function needs the model's parameters")
            optimizer = optimizer(self._training.model.parameters())
        admission.check_optimizer(optimizer)
        self._numerics.check(optimizer)
        self._training.optimizers.append(optimizer)
        if (part := self._wrapped.known) is not None:
            part.follow(optimizer)
        prefer_fused(optimizer)
        optimizer.register_load_state_dict_post_hook(lay_out)
        optimizer.register_step_pre_hook(self._loop.resources.check_update)
        return optimizer

    def scheduler(self, scheduler: Any) -> Any:
        """Return the learning-rate scheduler; the job steps it once for each committed step and keeps its state.

        Raises:
            UsageError: this is not a scheduler, or it needs a metric for each step.
        """
        admission.check_scheduler(scheduler)
        self._loop.records.schedulers.append(scheduler)
        return self._keep(f"scheduler-{len(self._loop.records.schedulers)}", scheduler)

    def register(self, name: str, stateful: _S) -> _S:
        """Return the object; from now on its ``state_dict`` is sent to joining ranks and saved in checkpoints.

        Raises:
            UsageError: the object has no ``state_dict``, or the name is taken.
        """
        self._training.has_own = True
        return self._keep(name, stateful)

    def _keep(self, name: str, stateful: _S) -> _S:
        admission.check_stateful("job.register", stateful)
        if name in self._training.extras:
            raise UsageError(f"job.register already has an object named {name!r}: use a different name for each object")
        self._training.extras[name] = stateful
        return stateful

    def buffers(
        self, name: str, rule: str | Callable[[torch.nn.Module], torch.Tensor | None], *, decay: float = 1.0
    ) -> None:
        """Say how a buffer or frozen parameter that changes in forward passes is combined over ranks and micro-batches.

        Every micro-batch of a step starts from the same values. After the step, the rule makes one value of those that
        the micro-batches leave. Layers of torch have their rules already: running statistics, observers and fake
        quantizers, spectral norm. Call this after ``job.wrap``, the same on every rank.

        Args:
            name: name in the model, or a pattern such as ``quantizer.*``; a later call takes precedence.
            rule: ``mean`` (weighted by samples), ``sum`` (of what each micro-batch adds), ``min``, ``max``, ``leader``
                (the value after the batch's first micro-batch), or ``own``, which each rank keeps for itself. Or a
                function that computes the value from the layer, whose other buffers are combined by then.
            decay: with ``sum``, the factor on the earlier value in each forward pass, such as 0.99 for moving sums.

        Raises:
            UsageError: the model has no such buffer or frozen parameter, or there is no such rule.
        """
        self._numerics.forward_state.declare(name, rule, decay=decay)

    def on_epoch_end(self, hook: EpochHook) -> EpochHook:
        """Call ``hook(epoch)`` on every rank after each epoch and report its return value. Usable as a decorator.

        ``epoch`` is the index of the epoch that has just ended, counted from 0. The model is in ``eval`` mode and
        gradients are off. If the loss of a peer interrupts a hook, it is called again.
        """
        admission.check_hook("job.on_epoch_end", hook, "epoch")
        self._hooks.after_epochs.append(hook)
        return hook

    def every_steps(self, steps: int) -> Callable[[StepsHook], StepsHook]:
        """Return a decorator: call ``hook(committed)`` on every rank after each ``steps`` committed steps.

        Otherwise the hook is as in ``on_epoch_end``: it may call ``job.sum`` and ``job.part``, its return value is
        reported, and it is called again if the loss of a peer interrupts it. ``committed`` counts steps since the job
        began, in a resumed job as well. Where an epoch ends with the step, these hooks come first.

        Raises:
            UsageError: ``steps`` is not a whole number of at least 1.
        """
        if callable(steps):
            raise UsageError("job.every_steps needs the number of steps: write @job.every_steps(500)")
        every = admission.whole_number("job.every_steps: steps", steps, least=1)

        def add(hook: StepsHook) -> StepsHook:
            admission.check_hook("job.every_steps", hook, "steps")
            self._hooks.after_steps.append((every, hook))
            return hook

        return add

    def on_restore(self, hook: Callable[[int], object]) -> Callable[[int], object]:
        """Call ``hook(epoch)`` on a rank that takes over a state, right before; a decorator.

        A rank that joins or resumes has run the script up to ``job.steps`` only. Frozen parameters and parameter groups
        follow the state by themselves. A script that gives the model other layers or shapes while it trains has to do
        the same here: ``epoch`` is the number of epochs whose ``on_epoch_end`` hooks have run, so hooks are the place
        for such a change. It may be called again, and on a rank that has made the change already.
        """
        admission.check_hook("job.on_restore", hook, "epoch")
        self._training.on_restore.append(hook)
        return hook

    def on_leader_change(self, hook: LeaderHook) -> LeaderHook:
        """Call ``hook(True)`` when this rank becomes the leader, ``hook(False)`` when it is not any more; a decorator.

        The first call comes before the first step, on the leader only. The state of the training is in place. The place
        for ``wandb.init``, with the same run id on every rank, so that a new leader continues the run. A hook runs on
        one rank, so it must not call anything that all ranks have to call, such as ``job.sum``.
        """
        admission.check_hook("job.on_leader_change", hook, "leads")
        self._leadership.hooks.append(hook)
        return hook
