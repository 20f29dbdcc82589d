"""How a part sums its gradients: whole ones, or pieces where some rank does not hold the whole model."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch

from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.exchange.interface import Gradients
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.numerics.method import Numerics
from heterotrain.parts.pieces.division import divide
from heterotrain.parts.pieces.piece_reducer import PieceReducer
from heterotrain.state.prepared import Confirmation, PreparedStep
from heterotrain.state.training import TrainState

_log = logging.getLogger(__name__)


class PieceSums:
    """The sums of the current formation, and those of the whole model while pieces are summed."""

    def __init__(self, training: TrainState, numerics: Numerics, whole: Reducer | None = None) -> None:
        """Begin with the sums of the whole model; ``None`` on a rank that holds nothing yet."""
        self._training, self._numerics = training, numerics
        self._current: Reducer | PieceReducer | None = whole
        self._whole = whole

    @property
    def current(self) -> Gradients | None:
        """The sums of the current formation; ``None`` on a rank that has not formed one, and lacks the whole model."""
        return self._current

    @property
    def second_phase(self) -> PieceSums | None:
        """Ends steps whose sums are pieces."""
        return self if isinstance(self._current, PieceReducer) else None

    def form(self, group: Group) -> None:
        """Sum whole gradients or, if some rank does not hold the whole model, pieces of them.

        Raises:
            PeerLost: the group broke meanwhile.
            UsageError: the ranks do not hold the same model.
        """
        self._end()
        division = divide(group, self._training.layout)
        if division is None:
            self._current = self._whole
        else:
            if self._whole is not None:
                self._whole.rest()
            if self._numerics.compresses:
                _log.warning(
                    "gradients of a divided model are not compressed: training.communication.compression has no effect"
                )
            self._current = PieceReducer(
                self._training.layout, division, rank=group.rank, bucket_bytes=self._numerics.bucket_bytes
            )
        if self._current is not None:
            self._current.form(group)

    def model_changed(self, model: torch.nn.Module, *, is_whole: bool) -> None:
        """Take this rank's new part of the model; ``is_whole`` says whether it is the whole model."""
        self._end()
        if isinstance(self._current, Reducer):
            self._current.rest()
        self._current = self._whole = self._numerics.reducer(model, is_cut=True) if is_whole else None

    def confirm(self, group: Group | None, prepared: PreparedStep | None) -> Confirmation:
        """Wait until every rank holds the sums of its own pieces; see ``parts.interface.SecondPhase``."""
        reducer, training = self._current, self._training
        if not isinstance(reducer, PieceReducer) or group is None:
            raise TypeError("whole gradients have no second phase")

        def accept(confirmation: Confirmation) -> None:
            reducer.known_squared = confirmation.squared

        row = [float(reducer.is_finite()), reducer.owned_squared()]  # the device may fail here, so before the promise
        if prepared is not None:
            finish = prepared.finish

            def late(confirmation: Confirmation) -> None:
                accept(confirmation)
                finish(confirmation)

            training.prepared = replace(prepared, finish=late)
        rows = group.gather_now(row, Purpose.CONFIRM)
        confirmation = Confirmation(math.fsum(row[1] for row in rows), is_finite=all(row[0] for row in rows))
        if prepared is not None:
            training.prepared, training.confirmed = None, (prepared.number, confirmation)
        accept(confirmation)
        return confirmation

    def abandon(self) -> None:
        """Drop reductions that are in flight."""
        if self._current is not None:
            self._current.abandon()

    def _end(self) -> None:
        if isinstance(self._current, PieceReducer):
            self._current.end()
