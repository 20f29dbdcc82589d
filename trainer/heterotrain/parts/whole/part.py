"""The whole model on every rank: data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from heterotrain.exchange.interface import Gradients
from heterotrain.membership.interface import ActiveGroup
from heterotrain.parts.batches import run
from heterotrain.parts.interface import Part
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.wrappers import checkpoint_more
from heterotrain.parts.whole.graphs import GraphedForward


class WholePart(Part):
    """The part of a rank that holds the whole model."""

    def __init__(
        self,
        model: torch.nn.Module,
        gradients: Gradients,
        *,
        layers: Sequence[torch.nn.Module] = (),
        draws: UnitDraws | None = None,
        graphs: GraphedForward | None = None,
    ) -> None:
        """Describe the part.

        Args:
            model: the model.
            gradients: sums its gradients.
            layers: those whose activations can be computed again.
            draws: random numbers of the units in ``step.compute``; ``None`` for those of the script.
            graphs: records the model's passes.
        """
        self._model, self._gradients = model, gradients
        self._layers, self._draws, self._graphs = layers, draws, graphs

    def form(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        """Agree with the other ranks on the order of gradients."""
        if self._graphs is not None:
            self._graphs.group = active_group.group
        if active_group.group is not None:
            self._gradients.form(active_group.group)
        return cap_samples

    @property
    def gradients(self) -> Gradients:
        """Sums whole gradients."""
        return self._gradients

    def forward(self, step: int, start: int, inputs: Any) -> Any:
        """Return the model's output for a micro-batch."""
        if self._draws is None:
            return run(self._model, inputs)
        with self._draws.at(step, start):
            return run(self._model, inputs)

    def spare_memory(self) -> bool:
        """Keep no activations of units from now on; return ``False`` if there is nothing more to spare."""
        if self._graphs is not None:
            self._graphs.stop()
        return checkpoint_more(self._layers)

    def release_memory(self) -> None:
        """Drop recordings of larger micro-batches."""
        if self._graphs is not None:
            self._graphs.drop()

    def abandon(self) -> None:
        """Drop reductions that are in flight."""
        self.gradients.abandon()
