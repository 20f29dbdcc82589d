"""Ranks with different data are found before the first step, and a newcomer with other data is refused alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Gate, Operator
from distributed.own_ranks import OwnRanks
from heterotrain_core.contract.outcome import Ending

SCRIPT = "distributed.differing_scripts:train"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("order", "rank 1 has another sample "),
        ("length", "rank 1 has 90 samples instead of 96"),
        ("sharded", "rank 1 has another sample "),
        ("stream", "rank 1 has another first sample of its stream"),
    ],
)
def test_different_data_are_one_error_on_all_ranks(
    own_ranks: OwnRanks, tmp_path: Path, kind: str, sentence: str
) -> None:
    """It says how they differ and what to leave out; no step was trained."""
    ranks = own_ranks.start(SCRIPT, world_size=2, kind=kind, out=str(tmp_path))
    assert [rank.ended() for rank in ranks] == [1, 1]
    for rank in ranks:
        assert f"ranks have different data than rank 0: {sentence}" in rank.log()
        assert "leave out sharding by rank" in rank.log()


@pytest.mark.parametrize("kind", ["same", "rounded", "restless", "unreadable"])
def test_what_only_looks_different_trains(own_ranks: OwnRanks, tmp_path: Path, kind: str) -> None:
    """Other last digits, changes that are random, and a stream that one rank alone can read."""
    ranks = own_ranks.start(SCRIPT, world_size=2, kind=kind, out=str(tmp_path))
    assert [rank.ended() for rank in ranks] == [0, 0], ranks[1].log()
    assert ("reads other samples a second time" in ranks[0].log()) == (kind == "restless")


def test_streams_of_different_lengths_are_one_error_before_their_last_step(own_ranks: OwnRanks, tmp_path: Path) -> None:
    """Where every rank reads, nothing else would show it until weights differ, or ranks wait for each other."""
    ranks = own_ranks.start(SCRIPT, world_size=2, kind="shorter", out=str(tmp_path))
    assert [rank.ended() for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "for step 5 rank 0 has 16 and the epoch's end, and rank 1 has 10 and the epoch's end" in rank.log()


def test_a_newcomer_with_other_data_is_refused_alone(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """The others end the training without it."""
    operator = operate(epochs=1)
    gate = Gate(operator.folder, 2)
    workers = operator.start_workers(2, faults=dict.fromkeys(range(2), gate.fault), script=SCRIPT, kind="order", rank=0)
    operator.plan(workers)
    newcomer = operator.start_ready("w2", script=SCRIPT, kind="order", rank=1)
    operator.plan([*workers, newcomer])
    gate.open()
    operator.finish([newcomer])
    assert newcomer.outcome is not None
    assert newcomer.outcome.ending is Ending.FAILED
    assert "the job trains with other data" in newcomer.outcome.reason
    assert "rank 2 has another sample " in newcomer.outcome.reason
    operator.finish(workers)
    assert [worker.code for worker in workers] == [0, 0], operator.evidence()
