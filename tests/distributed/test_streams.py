"""A stream is read once in total: by one rank for all, by another one after its loss, from the stream's own state."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.data_scripts import SAMPLES, stream_order
from distributed.harness import Gate, Operator, Worker, assert_finished

SCRIPT = "distributed.data_scripts:train"
BATCH = 16


def started(
    operator: Operator, shares: tuple[int, ...], *, kind: str, micro: Any = None, **options: Any
) -> list[Worker]:
    """Start workers that read a stream of this kind, with a plan of these shares."""
    ranks = operator.start_workers(len(shares), script=SCRIPT, kind=kind, **options)
    operator.plan(ranks, shares=shares, **({"micro": micro} if micro else {}))
    return ranks


def reads(operator: Operator, worker: Worker) -> Counter[tuple[int, int]]:
    """Return how often a worker has read each (epoch, position), without its look at the first sample of all."""
    path = operator.folder / f"reads-{worker.name}"
    lines = path.read_text().splitlines() if path.exists() else []
    assert lines[:1] in ([], ["0 0"])
    del lines[:1]
    return Counter((int(epoch), int(position)) for epoch, position in map(str.split, lines))


def check(operator: Operator, workers: list[Worker], *, epochs: int) -> None:
    """Fail unless the workers end with the weights and samples of one process that reads the stream."""
    positions = {epoch: list(range(SAMPLES)) for epoch in range(epochs)}
    assert_finished(operator, workers, epochs=epochs, order=stream_order, ids=positions)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_sample_is_read_once_in_total(operate: Callable[..., Operator], workers: int) -> None:
    """Not once per rank; a rank without samples in the plan takes part."""
    operator = operate(epochs=2)
    ranks = started(operator, (9, 0, 7), micro=(4, 0, 0), kind="counted", workers=workers)
    check(operator, ranks, epochs=2)
    total = sum((reads(operator, rank) for rank in ranks), Counter())
    assert total == Counter((epoch, position) for epoch in range(2) for position in range(SAMPLES))


@pytest.mark.parametrize("kind", ["counted", "stateless"])
def test_another_rank_reads_on_when_the_reader_is_lost(
    operate: Callable[..., Operator], tmp_path: Path, kind: str
) -> None:
    """From the stream's state it needs no more than a few samples; without one it begins at the beginning."""
    operator = operate(epochs=2)
    ranks = started(operator, (9, 2, 5), kind=kind, faults={0: {"place": "launched", "step": 9}})
    operator.finish(ranks)
    lost = ranks.pop(0)
    assert lost.code == -signal.SIGKILL
    check(operator, ranks, epochs=2)
    first = min(position for epoch, position in reads(operator, ranks[0]) if epoch == 1)
    # the lost step began at 48, and states are committed with their step
    assert first == (32 if kind == "counted" else 0)
    assert not reads(operator, ranks[1])


def test_a_checkpoint_has_the_streams_state(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """A resumed job does not read what comes before."""
    operator = operate(epochs=2, checkpoint_uri=f"file://{tmp_path}/checkpoints")
    gate = Gate(tmp_path, 4)
    ranks = started(operator, (9, 7), kind="counted", faults={0: gate.fault})
    operator.suspend(ranks, gate)
    resumed = started(operator, (4, 12), prefix="r", kind="counted")
    check(operator, resumed, epochs=2)
    found = sum((reads(operator, rank) for rank in resumed), Counter())
    begun = min(position for epoch, position in found if epoch == 0)
    assert 5 * BATCH - 2 * 8 <= begun < 5 * BATCH
    assert max(found.values()) == 1


def test_samples_that_cannot_be_sent_are_read_by_every_rank(operate: Callable[..., Operator]) -> None:
    """This is said once, with the name of their type."""
    operator = operate(epochs=1)
    ranks = started(operator, (9, 7), kind="opaque")
    check(operator, ranks, epochs=1)
    assert "every rank reads the whole stream" in ranks[0].log()
    assert "distributed.data_scripts.Opaque" in ranks[0].log()
    assert "every rank reads" not in ranks[1].log()
    for rank in ranks:
        assert set(reads(operator, rank).values()) == {1}


def test_every_rank_reads_where_the_script_wants_it(operate: Callable[..., Operator]) -> None:
    """Nothing is sent then."""
    operator = operate(epochs=1)
    ranks = started(operator, (9, 7), kind="counted", readers="all")
    check(operator, ranks, epochs=1)
    assert reads(operator, ranks[0]) == reads(operator, ranks[1])


def test_an_error_of_the_stream_ends_every_rank_with_it(operate: Callable[..., Operator]) -> None:
    """Otherwise each rank in turn would become the reader and fail."""
    operator = operate(epochs=2)
    ranks = started(operator, (6, 5, 5), kind="broken")
    operator.finish(ranks)
    assert [rank.code for rank in ranks] == [1, 1, 1]
    assert "KeyError: 'a field is missing'" in ranks[0].log()
    for rank in ranks[1:]:
        assert "the stream of epoch 1 failed on rank 0" in rank.log().splitlines()[-1]
        assert not reads(operator, rank)


def test_a_machine_that_cannot_read_leaves_it_to_another(operate: Callable[..., Operator]) -> None:
    """An error of the operating system or the network is that of one machine."""
    operator = operate(epochs=2)
    ranks = started(operator, (6, 5, 5), kind="unreachable")
    operator.finish(ranks)
    assert ranks[0].code == 1
    check(operator, ranks[1:], epochs=2)
