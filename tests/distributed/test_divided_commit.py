"""Faults in the two phases of a step of a divided model: every survivor ends with the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from distributed.fault_injectors import HOOKS_PLACE, PHASE_PLACES
from distributed.harness import Operator, assert_same_weights
from distributed.test_sharded_jobs import plan_pods, reference, start_pods, weights_of
from support.lineage import lineage
from support.repeat import part_of

BATCH, SAMPLES, EPOCHS = 16, 96, 2
STEP = 4
PLACES = ("backward", "reducing", "reduced", *PHASE_PLACES)
LATE = "is applied late"


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return the weights of one process."""
    return reference(epochs=EPOCHS, samples=SAMPLES, batch_samples=BATCH, clip_norm=0.5)


@pytest.mark.parametrize("place", part_of([place for place in PLACES if place != "backward"], of=3))
@pytest.mark.parametrize("victim", [(0, 1), (1, 0)])
def test_a_lost_message(operate: Callable[..., Operator], expected: Any, place: str, victim: tuple[int, int]) -> None:
    """All ranks live. The step is applied by all, late by those that had lost their peers, or repeated by all."""
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Sharded", peer_timeout_s=0.3)
    reached = operator.folder / "reached"
    fault = {"place": place, "step": STEP, "do": "lose", "reached": str(reached)}
    pods = start_pods(operator, 2, 1, faults={victim[0]: {victim[1]: fault}}, clip_norm=0.5)
    plan_pods(operator, pods, (10, 6))
    operator.finish([worker for pod in pods for worker in pod])
    assert reached.exists()
    for pod in pods:
        assert_same_weights(weights_of(operator, pod), expected)
    late = [worker for pod in pods for worker in pod if LATE in worker.log()]
    if place == "prepared":  # the others have heard of the victim, so they have applied the step
        assert late == [pods[victim[0]][victim[1]]], operator.evidence()


def test_a_step_that_is_applied_late_may_be_the_last_one(operate: Callable[..., Operator]) -> None:
    """The scripts end the training by its result. One script has not seen the result, and ends like the others."""
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Sharded", peer_timeout_s=0.3)
    fault = {"place": "prepared", "step": STEP, "do": "lose"}
    pods = start_pods(operator, 2, 1, faults={0: {0: fault}}, clip_norm=0.5, finish_at=STEP)
    workers = [worker for pod in pods for worker in pod]
    plan_pods(operator, pods, (10, 6))
    operator.finish(workers)
    assert [LATE in worker.log() for worker in workers] == [True, False, False], operator.evidence()
    assert [worker.code for worker in workers] == [0, 0, 0], operator.evidence()
    assert {epoch: len(ids) for epoch, ids in lineage(operator.folder / "samples").items()} == {0: (STEP + 1) * BATCH}


def test_hooks_that_one_rank_has_not_called_to_their_end_are_called_again(
    operate: Callable[..., Operator], expected: Any
) -> None:
    """Nobody else holds that rank's part, and nothing is lost: no rank goes back to a checkpoint."""
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Sharded", peer_timeout_s=0.3)
    fault = {"place": HOOKS_PLACE, "step": 0, "do": "lose"}
    (pod,) = start_pods(operator, 2, faults={0: {1: fault}}, clip_norm=0.5)
    plan_pods(operator, [pod], (BATCH,))
    operator.finish(pod)
    assert_same_weights(weights_of(operator, pod), expected)
    assert ["hooks after step 6 are called again" in worker.log() for worker in pod] == [True, False]
    assert "living ranks do not hold" not in operator.evidence()
    assert len(lineage(operator.folder / "samples")) == EPOCHS


@pytest.mark.parametrize("place", part_of(PLACES, of=3))
@pytest.mark.parametrize("victim", [(0, 0), (0, 1)])
def test_a_killed_rank_of_a_member(
    operate: Callable[..., Operator], expected: Any, place: str, victim: tuple[int, int]
) -> None:
    """Its member is broken. The other member goes on with the next plan, without a checkpoint."""
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Sharded", peer_timeout_s=0.3)
    reached = operator.folder / "reached"
    fault = {"place": place, "step": STEP, "do": "die", "reached": str(reached)}
    pods = start_pods(operator, 2, 1, faults={0: {victim[1]: fault}}, clip_norm=0.5)
    plan_pods(operator, pods, (10, 6))
    operator.until(reached.exists, "the place is reached")
    plan_pods(operator, pods[1:], (BATCH,), to=pods[1])
    operator.finish(pods[1])
    assert_same_weights(weights_of(operator, pods[1]), expected)
