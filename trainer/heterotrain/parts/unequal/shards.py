"""A rank of a sharded member whose parts of the training state differ in size: its layout, and its passes.

Every rank computes all units on its own samples, as many as its part of the share, and keeps a part of the training
state that suits its memory (Cephalo: Guo et al., ICS 2025). The member's ranks may be in different pods. A unit is
gathered when it is computed and released afterwards (``gathered_unit``); what is outside of the model's list of layers,
and tied parameters, stay gathered from the beginning of the forward pass to the end of the backward pass.

The ranks' samples differ, and a layer may be used by some of them only. All ranks gather and reduce all layers in their
order nevertheless (``unit_passes``).

Gradients are sums over the member's samples, as with whole models. ``sharded`` is the layout of equal parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from heterotrain_core.contract.plan import Layout

from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.batches import run
from heterotrain.parts.memory import return_large_blocks
from heterotrain.parts.unequal.gathered_unit import GatheredUnit, ParameterSlot, Place, rows_of
from heterotrain.parts.unequal.unit_passes import UnitPasses
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues
from heterotrain.parts.units.units import Units
from heterotrain.parts.units.wrappers import checkpoint_more
from heterotrain.state.layout import ModelLayout, Shapes, check_keys
from heterotrain.state.ranges import Holding


class ModelShards(ModelLayout):
    """A rank's part of the model, and the layout of its rank.

    Attributes:
        model: the whole model's object; its parameters are this rank's parts, flat.
    """

    def __init__(
        self,
        units: Units,
        layout: Layout,
        group: MemberGroup,
        values: InitialValues,
        *,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        """Divide a model on the meta device; parameters get values from ``begin`` or from the state that is loaded.

        Args:
            units: of the whole model; its object becomes this rank's part.
            layout: of the member.
            group: the member's ranks, by shard, to be connected with gloo.
            values: initial ones, on this rank's device.
            gather_dtype: format in which parameters are gathered; ``None`` for their own. Gradients are summed in the
                parameters' own format in any case.
        """
        seed, device = values.seed, values.device
        if device.type == "cpu":
            return_large_blocks()
        self.model = units.model
        self._values = values
        self._tensors = set(units.model.state_dict())
        self._shapes = {name: tuple(p.shape) for name, p in units.model.named_parameters()}
        first = {id(p): name for name, p in units.model.named_parameters()}
        every = list(units.model.named_parameters(remove_duplicate=False))
        self._first_names = {name: first[id(p)] for name, p in every}
        values.fill(units, with_parameters=False)
        places: dict[str, list[Place]] = {}
        for layer_name, layer in units.model.named_modules(remove_duplicate=False):
            for own in layer._parameters:  # noqa: SLF001  # torch has no public way
                name = self._first_names.get(f"{layer_name}.{own}".lstrip("."))
                if name is not None and (layer, own) not in places.setdefault(name, []):
                    places[name].append((layer, own))

        def edges(elements: int) -> tuple[int, ...]:
            return (*(layout.state_part(elements, shard)[0] for shard in range(layout.shards)), elements)

        def unit_of(names: Iterable[str]) -> GatheredUnit:
            chosen = {name: places[name] for name in names}
            rows = rows_of(chosen, edges, rank=group.rank(), device=device, gather_dtype=gather_dtype)
            return GatheredUnit(rows, group)

        alone = _alone(units, self._first_names)
        self._separate = tuple(alone)
        self._layers = units.layers
        self._units = [unit_of(names) for names in alone.values()]
        inside = {name for names in alone.values() for name in names}
        self._rest = unit_of(name for name in self._shapes if name not in inside)
        self._slots = {slot.name: slot for unit in (self._rest, *self._units) for slot in unit.slots}
        self._holding = {name: self._slots[name].own for name in self._shapes}
        self._has_values = False
        modules = dict(units.model.named_modules())
        self._passes = UnitPasses(units.model, [modules[name] for name in alone], self._units, self._rest)
        self._draws = UnitDraws(units, seed=seed, device=device)

    # -- passes ------------------------------------------------------------------------------------------------------

    def forward(self, step: int, start: int, inputs: Any) -> Any:
        """Return the model's output for a micro-batch.

        Args:
            step: number of the step.
            start: samples of the step before the micro-batch's first one.
            inputs: as in ``step.compute``.

        Raises:
            PeerLost: another rank of the member is lost or has left the pass.
        """
        with self._draws.at(step, start):
            return run(self.model, inputs)

    def forget_pass(self) -> None:
        """Leave a pass that was interrupted at any point; parts keep their values and gradients."""
        self._passes.forget()

    def checkpoint_units(self) -> None:
        """Compute activations of units again in the backward pass from now on."""
        checkpoint_more(self._layers)

    # -- the layout --------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        """Shapes of the whole model's parameters."""
        return self._shapes

    @property
    def holding(self) -> Holding:
        """This rank's part of each parameter."""
        return self._holding

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's parts, flat; a tied one has its first name in the whole model."""
        return ((name, self._slots[name].part) for name in self._shapes)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts and the model's buffers, also while units are gathered."""
        parts = {name: self._slots[first].part.detach() for name, first in self._first_names.items()}
        return dict(self.model.state_dict()) | parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over values; of a parameter the elements that this rank holds. Without values, memory is shared.

        Raises:
            RuntimeError: values are missing, unknown, or of another size.
        """
        given = {name: state.get(name) for name, slot in self._slots.items() if slot.own.elements}
        parameters = self._first_names.keys()
        buffers = {name: value for name, value in state.items() if name in self._tensors and name not in parameters}
        missing = [name for name, value in given.items() if value is None]
        missing += [name for name in self._tensors if name not in parameters and name not in buffers]
        unexpected = [name for name in state if name not in self._tensors and name not in parameters]
        check_keys(self.model, missing, unexpected)
        for name, value in given.items():
            slot, flat = self._slots[name], torch.as_tensor(value).detach().reshape(-1)
            if flat.numel() != slot.own.elements:
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(self.model).__name__}:\n\t"
                    f"size mismatch for {name}: {flat.numel()} elements for a part of {slot.own.elements}."
                )
            self._set(slot, flat)
        self._has_values = True
        self.model.load_state_dict(buffers, strict=False)

    def begin(self, units: Units) -> None:
        """Give parameters their initial values, if they have none yet, with one whole unit in memory at a time.

        Args:
            units: of another copy of the whole model, on the meta device.
        """
        if self._has_values:
            return
        together = [name for name in units.parts if name not in self._separate]
        for parts in (together, *([name] for name in self._separate)):
            self._values.fill(units, parts)
            for name, value in units.model.named_parameters(remove_duplicate=False):
                slot = self._slots[self._first_names[name]]
                if not value.is_meta and name == slot.name:
                    values = value.detach().reshape(-1)[slot.own.start : slot.own.stop]
                    self._set(slot, values.clone())
            for name in parts:
                units.parts[name].to("meta")
        self._has_values = True

    def _set(self, slot: ParameterSlot, values: torch.Tensor) -> None:
        if self._has_values:
            slot.part.detach().copy_(values)
        else:
            slot.part.data = values.to(self._values.device, slot.part.dtype)


def _alone(units: Units, first_names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the layers of the list that share no parameter with others: their parameters, by the layer's name."""
    uses = Counter(first_names.values())
    names = {layer: name for name, layer in units.parts.items()}
    found: dict[str, list[str]] = {}
    for layer in units.layers:
        prefix = names[layer]
        inside = [f"{prefix}.{name}" for name, _ in layer.named_parameters(remove_duplicate=False)]
        own = Counter(first_names[name] for name in inside)
        if own and all(uses[name] == number for name, number in own.items()):
            found[prefix] = list(own)
    return found
