"""Members leave, join and are lost; the weights and the samples are those of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from distributed.harness import Gate, Operator, Worker, assert_same_weights, reference
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.outcome import Ending

Operate = Callable[..., Operator]


def started(operator: Operator, count: int, **arguments: object) -> list[Worker]:
    """Start workers and give them a first plan once all are ready."""
    workers = [operator.start(f"w{i}", **arguments) for i in range(count)]
    operator.until_ready(*workers)
    return workers


def assert_finished(operator: Operator, workers: list[Worker], *, epochs: int = 2) -> None:
    """Fail unless these workers finished with the weights and samples of an undisturbed run."""
    operator.finish(workers)
    expected, ids = reference(epochs=epochs)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert (worker.code, worker.outcome.ending) == (0, Ending.FINISHED), worker.log()
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


def assert_left(worker: Worker, *, told: bool = False) -> None:
    """Fail unless the worker left in order, and says whether it was by SIGTERM: the operator asks who sent that."""
    assert worker.outcome is not None, worker.log()
    assert (worker.code, worker.outcome.ending, worker.outcome.told) == (0, Ending.LEFT, told), worker.log()


def test_sigterm_lets_a_worker_go_and_repeats_nothing(operate: Operate) -> None:
    """An announced leave costs no sample and no step, with no operator in reach."""
    operator = operate()
    workers = started(operator, 3, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    workers[2].signal(signal.SIGTERM)
    operator.finish(workers)
    assert_left(workers[2], told=True)
    assert_finished(operator, workers[:2])
    assert not any("is repeated" in worker.log() for worker in workers)


def test_one_of_two_leaves_and_the_other_goes_on(operate: Operate) -> None:
    """An announced leave needs no majority: the leaver itself agrees."""
    operator = operate()
    workers = started(operator, 2, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    workers[0].signal(signal.SIGTERM)
    operator.finish(workers)
    assert_left(workers[0], told=True)
    assert_finished(operator, workers[1:])


def test_a_drained_worker_leaves(operate: Operate) -> None:
    """The plan's drain list does what SIGTERM does."""
    operator = operate()
    workers = started(operator, 3, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 2)
    operator.plan(workers, new_generation=False, drain=("w1",))
    operator.finish([workers[1]])
    assert_left(workers[1])
    assert_finished(operator, [workers[0], workers[2]])


@pytest.mark.parametrize("place", ["step", "launched", "reducing", "reduced", "applied"])
def test_a_killed_worker_is_survived_without_the_operator(operate: Operate, place: str) -> None:
    """Whatever the victim was doing, the survivors repeat its step, or adopt it when somebody had committed it."""
    operator = operate()
    workers = [operator.start(f"w{i}", fault={"place": place, "step": 4} if i == 2 else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    assert workers[2].code == -signal.SIGKILL
    assert_finished(operator, workers[:2])


def test_the_store_host_is_killed(operate: Operate) -> None:
    """The lowest rank hosts the store; the next formation has a fresh one elsewhere."""
    operator = operate()
    workers = [operator.start(f"w{i}", fault={"place": "reducing", "step": 5} if i == 0 else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    assert workers[0].code == -signal.SIGKILL
    assert_finished(operator, workers[1:])


def test_two_of_five_are_killed_at_once_and_one_more_later(operate: Operate) -> None:
    """Three of five are a majority, and two of those three are one again."""
    operator = operate()
    steps = {1: 3, 3: 3, 4: 7}
    workers = [
        operator.start(f"w{i}", fault={"place": "backward", "step": steps[i]} if i in steps else None) for i in range(5)
    ]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    assert_finished(operator, [workers[0], workers[2]])


@pytest.mark.parametrize("place", ["building", "built"])
def test_a_loss_while_forming_anew_is_survived(operate: Operate, place: str) -> None:
    """While the survivors of one loss connect to each other, another one is lost."""
    operator = operate(epochs=3)
    faults = {3: {"place": "reducing", "step": 4}, 1: {"place": place, "step": 1}}
    workers = [operator.start(f"w{i}", fault=faults.get(i)) for i in range(4)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish(workers)
    assert [w.code for w in workers] == [0, -signal.SIGKILL, 0, -signal.SIGKILL]
    assert_finished(operator, [workers[0], workers[2]], epochs=3)


def test_one_of_two_waits_for_the_operator(operate: Operate) -> None:
    """One of two is no majority: the survivor waits, then goes on as the new plan says."""
    operator = operate()
    workers = [operator.start(f"w{i}", fault={"place": "backward", "step": 4} if i == 1 else None) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish([workers[1]])
    operator.until(lambda: "waiting for the operator's plan" in workers[0].log(), "the survivor waits")
    operator.plan(workers[:1])
    assert_finished(operator, workers[:1])
    assert "formation 1.1" not in workers[0].log()


def test_a_step_that_only_some_have_committed_is_taken_over(operate: Operate) -> None:
    """One survivor loses the last message of a step that the others commit: it takes their state, and repeats nothing."""
    operator = operate()
    release = operator.folder / "release"
    fault = {"place": "reduced", "step": 4, "do": "lose", "release": str(release)}
    workers = [operator.start("w0"), operator.start("w1", fault=fault), operator.start("w2")]
    operator.until_ready(*workers)
    operator.plan(workers)
    for worker in (workers[0], workers[2]):
        operator.until_step(worker, 5)
    release.touch()
    assert_finished(operator, workers)
    assert "step 4 is repeated" in workers[1].log()
    assert "step 4 is repeated" not in workers[0].log() + workers[2].log()


def test_a_late_joiner_gets_its_state_from_the_survivors(operate: Operate) -> None:
    """A joiner ends with the same weights, optimizer state included, and no step is repeated."""
    operator = operate(epochs=3)
    workers = started(operator, 2, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    workers += [operator.start("w2")]
    operator.until_ready(workers[2])
    operator.plan(workers, shares=(5, 5, 6))
    assert_finished(operator, workers, epochs=3)
    assert not any("is repeated" in worker.log() for worker in workers)


def test_a_lost_worker_is_replaced(operate: Operate) -> None:
    """Survivors go on by themselves, then take the replacement in."""
    operator = operate(epochs=4)
    workers = [
        operator.start(f"w{i}", slow_s=0.02, fault={"place": "reducing", "step": 4} if i == 1 else None)
        for i in range(3)
    ]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.finish([workers[1]])
    replacement = operator.start("w1", incarnation=1)
    operator.until_ready(replacement)
    operator.until_step(workers[0], 6)
    operator.plan([workers[0], workers[2], replacement])
    assert_finished(operator, [workers[0], workers[2], replacement], epochs=4)


def test_a_frozen_worker_is_given_up_and_fenced_when_it_wakes(operate: Operate) -> None:
    """A worker that answers nothing is lost; when it comes back to life it leaves and disturbs nobody."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(operator.folder, 9)  # the others must not finish first: then nobody is left to fence the frozen one
    workers = [operator.start(f"w{i}", slow_s=0.02, fault=gate.fault if i == 0 else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    workers[2].signal(signal.SIGSTOP)
    # Not at the first vote: a survivor that has not yet missed the frozen worker still counts on it.
    operator.until(lambda: "rank 0 of 2, shares" in workers[0].log(), "the others go on without it")
    workers[2].signal(signal.SIGCONT)
    operator.finish([workers[2]])
    gate.open()
    operator.finish(workers)
    assert_left(workers[2])
    assert_finished(operator, workers[:2])


def test_a_frozen_worker_is_not_waited_for_though_the_operator_names_it(operate: Operate) -> None:
    """Two of four freeze, so the others ask the operator, who has noticed only one of the two: they go on without both."""
    operator = operate(peer_timeout_s=0.3)
    workers = started(operator, 4, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    for frozen in workers[2:]:
        frozen.signal(signal.SIGSTOP)
    for worker in workers[:2]:
        operator.until(lambda w=worker: "2 of 4 members are left" in w.log(), f"{worker.name} asks for a plan")  # type: ignore[misc]  # a default argument binds the loop's variable
    operator.plan(workers[:3], to=workers[:2])
    assert_finished(operator, workers[:2])


def test_a_joiner_that_dies_while_joining_is_survived(operate: Operate) -> None:
    """The plan names somebody who never arrives; those with the state are a majority of it and go on."""
    operator = operate(epochs=3, peer_timeout_s=0.5)
    workers = started(operator, 2, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    joiner = operator.start("w2")
    operator.until_ready(joiner)
    joiner.signal(signal.SIGKILL)
    operator.finish([joiner])
    operator.plan([*workers, joiner], to=workers)
    assert_finished(operator, workers, epochs=3)


@pytest.mark.parametrize(
    ("count", "deaf", "goes"), [(3, 2, 2), (3, 0, 1), (2, 0, 1), (2, 1, 1)],
    ids=["the deaf one goes", "whom it cannot call goes", "the deaf one of two stays", "the deaf one of two goes"],
)  # fmt: skip
def test_a_peer_that_can_be_called_one_way_only_for_good(operate: Operate, count: int, deaf: int, goes: int) -> None:
    """One of the two goes, though each can be reached by all others; nobody waits for a mended cable or for the operator."""
    operator = operate(peer_timeout_s=0.3)
    cut = {"place": "step", "step": 4, "do": "deafen", "release": str(operator.folder / "never")}
    gate = Gate(operator.folder, 5)  # nobody finishes before the cut is noticed
    faults = [cut if number == deaf else gate.fault for number in range(count)]
    workers = [operator.start(f"w{number}", slow_s=0.02, fault=fault) for number, fault in enumerate(faults)]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until(lambda: "WARNING peer w" in workers[deaf].log(), "the cut is noticed")
    gate.open()
    operator.finish(workers)
    assert_left(workers[goes])
    assert_finished(operator, [worker for number, worker in enumerate(workers) if number != goes])
