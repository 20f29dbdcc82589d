"""The second phase of a step of a divided model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import PeerLost
from heterotrain.numerics.method import Numerics
from heterotrain.parts.pieces.division import PieceDivision
from heterotrain.parts.pieces.piece_reducer import PieceReducer
from heterotrain.parts.pieces.sums import PieceSums
from heterotrain.state.prepared import PreparedStep
from heterotrain.state.ranges import pieces_of
from heterotrain.state.training import TrainState
from heterotrain_core.contract.config import TrainingConfig
from support.divided_models import SHAPES, full, training_of


def a_rank() -> tuple[PieceSums, TrainState, PieceReducer]:
    """Return the sums of a rank that holds everything, in a formation of pieces."""
    training = training_of(full(), seed=1)
    sizes = {name: extent.stop for name, extent in full().items()}
    division = PieceDivision(names=tuple(SHAPES), pieces=pieces_of(sizes, [full()]), holding=full())
    reducer = PieceReducer(training.layout, division, rank=0, bucket_bytes=64)
    sums = PieceSums(training, Numerics(TrainingConfig(), torch.device("cpu"), training))
    sums._current = reducer
    return sums, training, reducer


def test_a_rank_that_cannot_read_its_sums_has_promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may fail in the last moment; the step would otherwise be finished late with a part of a sum."""
    sums, training, _ = a_rank()

    def fails(_self: PieceReducer) -> bool:
        raise PeerLost("the device has left a collective in the middle")

    monkeypatch.setattr(PieceReducer, "is_finite", fails)
    group: Any = SimpleNamespace(gather_now=lambda *_arguments: pytest.fail("nothing is told to the others"))
    with pytest.raises(PeerLost):
        sums.confirm(group, PreparedStep(3, finish=pytest.fail, drop=lambda: None))
    assert training.prepared is None


def test_a_step_that_is_finished_late_knows_the_whole_norm() -> None:
    """Ranks that lose each other between the phases clip by the norm that some of them have confirmed."""
    sums, training, reducer = a_rank()
    finished: list[float] = []

    def loses(_row: list[float], _purpose: object) -> list[list[float]]:
        raise PeerLost("the others are gone")

    group: Any = SimpleNamespace(gather_now=loses)
    with pytest.raises(PeerLost):
        sums.confirm(
            group, PreparedStep(3, finish=lambda _all: finished.append(reducer.known_squared), drop=lambda: None)
        )
    assert training.prepared is not None
    training.prepared.finish(sums.confirm(SimpleNamespace(gather_now=lambda row, _purpose: [row, [1.0, 9.0]]), None))  # type: ignore[arg-type]  # all of the group that is used
    assert finished == [9.0]
