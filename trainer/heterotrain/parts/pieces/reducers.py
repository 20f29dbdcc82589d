"""How this rank's gradients are summed: whole ones, or pieces where some rank does not hold the whole model."""

from __future__ import annotations

import logging
from typing import cast

import torch

from heterotrain.errors import UsageError
from heterotrain.network.group import Group
from heterotrain.numerics.gradients import Gradients
from heterotrain.numerics.method import Numerics
from heterotrain.numerics.reducer import Reducer
from heterotrain.parts.pieces.piece_reducer import PieceReducer, divide
from heterotrain.state.admission import check_belongs, check_model
from heterotrain.state.training import TrainState

_log = logging.getLogger(__name__)


class Reducers:
    """The reducer of the current formation, and that of the whole model while pieces are summed.

    Attributes:
        current: ``None`` before the script has wrapped a model, and on a rank without a part of it.
    """

    def __init__(self, training: TrainState, numerics: Numerics) -> None:
        self.current: Gradients | None = None
        self._training = training
        self._numerics = numerics
        self._whole: Reducer | None = None
        self._known: set[int] = set()

    @property
    def is_divided(self) -> bool:
        """Whether pieces are summed, because some rank does not hold the whole model."""
        return isinstance(self.current, PieceReducer)

    def require(self) -> Gradients:
        """Return the current reducer.

        Raises:
            UsageError: the script has not wrapped a model.
        """
        if self.current is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.current

    def watching(self) -> Gradients:
        """Return the current reducer; it checks layers and parameters that the script adds or replaces.

        Raises:
            UsageError: the script has not wrapped a model.
        """
        reducer = self.require()
        reducer.on_change = self._parameters_changed
        return reducer

    def choose(self, group: Group) -> None:
        """Sum whole gradients or, if some rank does not hold the whole model, pieces of them.

        Raises:
            PeerLost: the group broke meanwhile.
            UsageError: the ranks do not hold the same model.
        """
        current = self.current
        if isinstance(current, Reducer):
            self._whole = current
        elif isinstance(current, PieceReducer):
            current.end()
        division = divide(group, self._training.layout)
        if division is None:
            self.current = self._whole
            return
        if self._whole is not None:
            self._whole.rest()
        if self._numerics.compresses:
            _log.warning(
                "gradients of a divided model are not compressed: training.communication.compression has no effect"
            )
        self.current = PieceReducer(
            self._training.layout, division, rank=group.rank, bucket_bytes=self._numerics.bucket_bytes
        )

    def model_changed(self, model: torch.nn.Module, is_whole: bool) -> None:  # noqa: FBT001  # a callback
        """Take this rank's new part of the model.

        Args:
            model: the part.
            is_whole: whether it is the whole model.
        """
        if isinstance(self.current, PieceReducer):
            self.current.end()
        elif self.current is not None:
            cast("Reducer", self.current).rest()
        self.current = self._whole = self._numerics.reducer(model, is_cut=True) if is_whole else None

    def _parameters_changed(self) -> None:
        """Check and convert layers that the script has added or replaced, and the optimizers' parameters.

        Raises:
            UsageError: the model or an optimizer cannot be trained this way.
        """
        model = self._training.model
        if model is not None:
            check_model(model)
            self._numerics.layers_changed(model)
            check_belongs(model, self._training.optimizers, earlier=self._known)
            self._known |= {id(parameter) for parameter in model.parameters()}
