"""Seeded histories of faults of every kind, at every place of the step protocol.

Each history ends with the weights and the samples of an undisturbed run, however late the operator reacts.
See ``drawn_histories`` for its seeds. If they are named, a table shows the number of faults of each kind at each place.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from distributed.drawn_histories import VARIABLE, Draws, faults_of, in_own_folder, seeds
from distributed.fault_scenario import FAULTS, PLACES, FaultScenario, possible
from distributed.harness import Operator, assert_same_weights, reference
from heterotrain_core.contract.outcome import Ending
from support.lineage import lineage

ASKED = os.environ.get(VARIABLE, "")
EPOCHS = 3
FAULTS_EACH = 2
CELLS = [(what, place) for what in FAULTS for place in PLACES if possible(what, place)]
random.Random(0).shuffle(CELLS)  # noqa: S311  # not a secret; a few histories cover many kinds
COVERED: Counter[tuple[str, str]] = Counter()


@pytest.fixture(scope="module", autouse=True)
def table(pytestconfig: pytest.Config) -> Iterator[None]:
    """Print the table at the end, if the number of histories was given."""
    yield
    if ASKED:
        places = dict.fromkeys((*PLACES, *(place for _, place in COVERED)))
        rows = [[what, *(str(COVERED[what, p]) if possible(what, p) else "" for p in places)] for what in FAULTS]
        lines = [f"| {' | '.join(row)} |" for row in (["", *places], ["---"] * (len(places) + 1), *rows)]
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *lines, sep="\n")


@pytest.mark.parametrize("seed", seeds(gate=4, every=300))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """One history."""
    play(operate, seed, "once")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_a_seed_repeats_its_history(operate: Callable[..., Operator], seed: int) -> None:
    """The same faults happen to the same victims at the same places of the same steps."""
    found = play(operate, seed, "first")
    assert found, "the seed has no faults"
    assert play(operate, seed, "second") == found


def play(
    operate: Callable[..., Operator], seed: int, name: str, *, late: Sequence[tuple[str, str]] = ()
) -> list[dict[str, Any]]:
    """Play a history, with one more fault where steps are confirmed ``late``; return the faults that happened."""
    draw = Draws(seed)
    cells = [CELLS[(FAULTS_EACH * seed + number) % len(CELLS)] for number in range(FAULTS_EACH)]
    cells += late
    operator = in_own_folder(operate(epochs=EPOCHS, peer_timeout_s=0.3, checkpoint_uri=None), name)
    if draw.chance(0.5, "checkpoints"):  # otherwise workers that join after all others have left start from scratch
        operator.config = replace(operator.config, checkpoint_uri=f"file://{operator.folder}/checkpoints")
        if seed % 2:  # otherwise a checkpoint is written only when workers are asked to leave
            operator.config = replace(operator.config, checkpoint_interval_s=0.0)
    scenario = FaultScenario(draw=draw, operator=operator, cells=cells, late=bool(late))
    scenario.begin()
    scenario.play()
    COVERED.update(cell for cell, event in zip(cells, scenario.scheduled, strict=True) if event.reached.exists())
    expected, ids = reference(epochs=EPOCHS)
    for worker in scenario.workers:
        early = worker.outcome is None and worker.uid in scenario.leaving  # SIGTERM came before the handler was set
        assert worker.code in (None, 0, -signal.SIGKILL, -signal.SIGTERM if early else 0), worker.log()
        if worker.outcome is not None:
            assert worker.outcome.ending is not Ending.FAILED, worker.log()
            if worker.outcome.ending is Ending.FINISHED and worker.code == 0:
                assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids
    return faults_of(operator)
