"""A model that is divided anew for each formation: the whole model without values, and its units.

The whole model stays on the meta device. A stage, or a rank's part of every unit, is made from a copy of it, so
parameters have the same names, order and ties in every layout. ``job.wrap`` returns the whole model; it has no values
and cannot be run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from heterotrain_core.contract.plan import Layout
from heterotrain_core.units import UnitProfile

from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.planned import optimizer_costs, unit_profile
from heterotrain.parts.stages.stage import Stage
from heterotrain.parts.stages.trace import PassTrace, trace
from heterotrain.parts.unequal.shards import ModelShards
from heterotrain.parts.units.initial_weights import InitialValues, copied
from heterotrain.parts.units.units import Units, check_number, check_stages, units_of
from heterotrain.parts.units.wrappers import DEFAULT, WrapOptions, checkpoint_more, prepare_units

CANNOT_RUN = (
    "a model that is cut into stages has no values here: run it with step.compute(loss_fn), and with "
    "job.evaluate(data_set, measure) in hooks"
)


class CuttableModel:
    """The whole model, from which this rank makes its stages.

    Attributes:
        model: the whole model, on the meta device.
        names: of its units.
        seen: how the model computes; ``None`` before ``look``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        path: str | None,
        values: InitialValues,
        *,
        options: WrapOptions = DEFAULT,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        """Describe a model on the meta device, which cannot be run from now on.

        Args:
            model: the whole model.
            path: name of its list of layers; ``None`` for a ``torch.nn.Sequential``.
            values: initial ones, on this rank's device.
            options: of ``job.wrap``.
            gather_dtype: format in which sharded members gather parameters; ``None`` for their own.

        Raises:
            UsageError: it is not a sequence of units, or stages cannot compute it exactly.
        """
        check_stages(model)
        self.model = model
        self.names = units_of(model, path).names
        self.seen: PassTrace | None = None
        self._path, self._values, self._options, self._gather_dtype = path, values, options, gather_dtype
        self._guard = model.register_forward_pre_hook(_cannot_run)

    def look(self, inputs: Any) -> PassTrace:
        """Find out how the model computes; nothing is computed.

        Args:
            inputs: of a batch of at least one sample.

        Raises:
            UsageError: the model is not a sequence of its units.
        """
        if self.seen is None:
            self.seen = trace(self._units(), inputs)
        return self.seen

    def profile(
        self, inputs: Callable[[int], Any], *, kind: str, limit_s: float, processors: float = math.inf
    ) -> tuple[UnitProfile, ...]:
        """Measure the units on this rank's device; see ``unit_profile.profile``.

        Raises:
            UsageError: the model is not a sequence of its units, or a unit computes nothing.
        """
        return unit_profile.profile(
            self._units, inputs, kind=kind, values=replace(self._values, weights=None), limit_s=limit_s,
            processors=processors,
        )  # fmt: skip

    def state_ratio(self, optimizers: Sequence[torch.optim.Optimizer]) -> float | None:
        """Return bytes of training state for each byte of parameters; see ``optimizer_costs.state_ratio``.

        Args:
            optimizers: of the whole model's parameters.
        """
        if self.seen is None:
            return None
        parts = units_of(self.model, self._path).parts
        units = [[p for name in names for p in parts[name].parameters()] for names in self.seen.parts]
        return optimizer_costs.state_ratio(units, optimizers)

    def update_s_per_byte(self, optimizers: Sequence[torch.optim.Optimizer], *, processors: float) -> float | None:
        """Measure the optimizers' update on this rank's device; see ``optimizer_costs.update_s_per_byte``."""
        whole = sum(parameter.nbytes for parameter in self.model.parameters())
        return optimizer_costs.update_s_per_byte(optimizers, whole, device=self._values.device, processors=processors)

    def stage(self, cuts: Sequence[int], group: MemberGroup, *, recomputes: bool = False) -> Stage:
        """Return this rank's stage, without values.

        Args:
            cuts: first unit of each stage, and the number of units at the end.
            group: the member's ranks, in the order of stages.
            recomputes: whether it computes activations again in the backward pass.

        Raises:
            UsageError: the model cannot be cut there, or ``look`` was not called.
        """
        if self.seen is None:
            raise UsageError("call job.steps(...) before stages are made: they need the shape of a sample")
        return Stage(self._prepared(recomputes=recomputes), self.seen, cuts, group, self._values)

    def shards(self, layout: Layout, group: MemberGroup) -> ModelShards:
        """Return this rank's part in a sharded member, without values.

        Args:
            layout: of the member.
            group: the member's ranks, by shard.
        """
        return ModelShards(self._prepared(), layout, group, self._values, gather_dtype=self._gather_dtype)

    def checkpoint_units(self) -> bool:
        """Let all parts from now on compute activations again; return ``False`` if they have done so before."""
        before, self._options = self._options, replace(self._options, checkpoint_units=True)
        return not before.checkpoint_units

    def begin(self, part: Stage | ModelShards) -> None:
        """Give a stage or shards without values their initial ones."""
        part.begin(self._units())

    def even_cuts(self, stages: int) -> tuple[int, ...]:
        """Return cuts into stages with nearly equal bytes of parameters, the same on every rank.

        Args:
            stages: at least 1.

        Raises:
            UsageError: there are more stages than units.
        """
        check_number(self.names, stages)
        sizes = (self.seen.parameter_bytes if self.seen is not None else ()) or (1,) * len(self.names)
        cuts, done, total = [0], 0, sum(sizes)
        for unit, size in enumerate(sizes):
            left = len(self.names) - unit
            due = done >= total * len(cuts) / stages and unit > cuts[-1]
            if len(cuts) < stages and unit and (due or left == stages - len(cuts)):
                cuts.append(unit)
            done += size
        return (*cuts, len(self.names))

    def _prepared(self, *, recomputes: bool = False) -> Units:
        """Return the units of a copy of the model, with the options of ``job.wrap`` and of its part of the plan.

        As the planner counts memory and time, the model's first and last unit do not compute again for a plan.
        """
        units = self._units()
        if recomputes and not self._options.checkpoint_units:
            inner = range(max(1, units.first_layer), len(units.names) - 1)
            chosen = (unit - units.first_layer for unit in inner)
            checkpoint_more(units.layers[layer] for layer in chosen if layer < len(units.layers))
        prepare_units(units.layers, self._options)
        return units

    def _units(self) -> Units:
        model = copied(self.model)
        model._forward_pre_hooks.pop(self._guard.id, None)  # noqa: SLF001  # torch cannot copy a model without hooks
        return units_of(model, self._path)


def _cannot_run(*_: object) -> NoReturn:
    raise UsageError(CANNOT_RUN)
