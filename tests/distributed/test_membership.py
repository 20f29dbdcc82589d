"""Members leave, join and are lost; the weights and the samples are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Gate, Operator, Worker, assert_finished
from heterotrain_core.contract.outcome import Ending
from support.lineage import lineage

Operate = Callable[..., Operator]


def held(operator: Operator, count: int, gate: Gate) -> list[Worker]:
    """Start workers with a first plan, and wait until the first of them holds all others at the gate."""
    workers = operator.start_workers(count, faults={0: gate.fault})
    operator.plan(workers)
    operator.until(gate.reached, f"{workers[0].name} is at the gate")
    return workers


def assert_left(worker: Worker, *, told: bool = False) -> None:
    """Fail unless the worker shut down gracefully and reports whether it got SIGTERM, which the operator explains."""
    assert worker.outcome is not None, worker.log()
    assert (worker.code, worker.outcome.ending, worker.outcome.told) == (0, Ending.LEFT, told), worker.log()


@pytest.mark.parametrize("count", [2, 3])
def test_a_worker_leaves_on_sigterm_and_no_step_is_repeated(operate: Operate, count: int) -> None:
    """An announced leave costs no sample and no step, even without an operator and without a majority of survivors."""
    operator = operate()
    gate = Gate(operator.folder, 4)
    workers = held(operator, count, gate)
    workers[0].signal(signal.SIGTERM)
    gate.open()
    operator.finish(workers)
    assert_left(workers[0], told=True)
    assert_finished(operator, workers[1:])
    assert not any("is repeated" in worker.log() for worker in workers)


def test_a_drained_worker_leaves(operate: Operate) -> None:
    """The plan's drain list has the same effect as SIGTERM."""
    operator = operate()
    gate = Gate(operator.folder, 3)
    workers = held(operator, 3, gate)
    operator.plan(workers, new_generation=False, drain=("w1",))
    operator.until_read(workers)
    gate.open()
    operator.finish([workers[1]])
    assert_left(workers[1])
    assert_finished(operator, [workers[0], workers[2]])


@pytest.mark.parametrize(
    ("victim", "place"),
    [*((2, place) for place in ("step", "launched", "reducing", "reduced", "applied")), (0, "reducing")],
)
def test_the_others_survive_a_killed_worker_without_the_operator(operate: Operate, victim: int, place: str) -> None:
    """The survivors repeat the step, or adopt it if one of them has committed it. The lowest rank hosts the store."""
    operator = operate()
    workers = operator.start_workers(3, faults={victim: {"place": place, "step": 4}})
    operator.plan(workers)
    operator.finish(workers)
    assert workers.pop(victim).code == -signal.SIGKILL
    assert_finished(operator, workers)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_job_over_ipv6_survives_a_killed_worker(operate: Operate, tmp_path: Path) -> None:
    """All connections are of IPv6, gloo's too, although the interface has an IPv4 address; they are cut at the loss."""
    operator, gate = operate(), Gate(tmp_path, 7)
    operator.address = "::1"
    workers = operator.start_workers(3, faults={0: gate.fault, 2: {"place": "reducing", "step": 4}})
    operator.plan(workers)
    operator.finish(workers[2:])
    operator.until(gate.reached, "the survivors continue by themselves")
    for worker in workers[:2]:
        assert connections(worker, "tcp6"), "the test would prove nothing"
        assert not connections(worker, "tcp")
    gate.open()
    assert_finished(operator, workers[:2])


def connections(worker: Worker, family: str) -> list[str]:
    """Return the remote addresses of a worker's connections of a family, ``tcp`` or ``tcp6``, in the kernel's words."""
    rows = [line.split() for line in Path(f"/proc/{worker.pid}/net/{family}").read_text().splitlines()[1:]]
    inodes = set()
    for descriptor in Path(f"/proc/{worker.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return [row[2] for row in rows if row[9] in inodes and row[3] == "01"]  # established


def test_two_of_five_are_killed_at_once_and_one_more_later(operate: Operate) -> None:
    """Three of five are a majority, and so are two of these three."""
    operator = operate()
    steps = {1: 3, 3: 3, 4: 7}
    workers = operator.start_workers(5, faults={i: {"place": "backward", "step": step} for i, step in steps.items()})
    operator.plan(workers)
    operator.finish(workers)
    assert_finished(operator, [workers[0], workers[2]])


@pytest.mark.parametrize("place", ["building", "built"])
def test_a_second_loss_during_the_new_formation_is_survived(operate: Operate, place: str) -> None:
    """While the survivors of one loss connect to each other, another worker is lost."""
    operator = operate(epochs=3)
    faults = {3: {"place": "reducing", "step": 4}, 1: {"place": place, "step": 1}}
    workers = operator.start_workers(4, faults=faults)
    operator.plan(workers)
    operator.finish(workers)
    assert [w.code for w in workers] == [0, -signal.SIGKILL, 0, -signal.SIGKILL]
    assert_finished(operator, [workers[0], workers[2]], epochs=3)


def test_one_of_two_waits_for_the_operator(operate: Operate) -> None:
    """One of two is not a majority: the survivor waits, then continues by the new plan."""
    operator = operate()
    workers = operator.start_workers(2, faults={1: {"place": "backward", "step": 4}})
    operator.plan(workers)
    operator.finish([workers[1]])
    operator.until(lambda: "waiting for the operator's plan" in workers[0].log(), "the survivor waits")
    operator.plan(workers[:1])
    assert_finished(operator, workers[:1])
    assert "formation 1.1" not in workers[0].log()


def test_a_step_that_only_some_have_committed_is_adopted(operate: Operate) -> None:
    """A rank that lost the last message of a committed step takes the others' state; no other rank repeats the step."""
    operator = operate()
    release = operator.folder / "release"
    fault = {"place": "reduced", "step": 4, "do": "lose", "release": str(release)}
    workers = operator.start_workers(3, faults={1: fault})
    operator.plan(workers)
    for worker in (workers[0], workers[2]):
        operator.until_step(worker, 5)
    release.touch()
    assert_finished(operator, workers)
    assert "step 4 is repeated" in workers[1].log()
    assert "step 4 is repeated" not in workers[0].log() + workers[2].log()


def test_the_end_of_the_training_is_adopted_with_its_last_step(operate: Operate) -> None:
    """A rank that lost the last message of the step in which the script ended the training ends it, too."""
    operator = operate()
    release = operator.folder / "release"
    fault = {"place": "reduced", "step": 4, "do": "lose", "release": str(release)}
    workers = operator.start_workers(3, faults={1: fault}, finish_at=4)
    operator.plan(workers)
    for worker in (workers[0], workers[2]):
        operator.until_step(worker, 5)
    release.touch()
    operator.finish(workers)
    for worker in workers:
        assert worker.outcome is not None, worker.log()
        assert (worker.code, worker.outcome.ending) == (0, Ending.FINISHED), worker.log()
        assert worker.outcome.step == 5
    assert len(lineage(operator.folder / "samples")[0]) == 5 * 16


def test_a_late_joiner_gets_its_state_from_the_survivors(operate: Operate) -> None:
    """A joiner ends with the same weights, optimizer state included, and no step is repeated."""
    operator = operate(epochs=3)
    gate = Gate(operator.folder, 4)
    workers = held(operator, 2, gate)
    workers.append(operator.start_ready("w2"))
    operator.plan(workers, shares=(5, 5, 6))
    operator.until_read(workers[:2])
    gate.open()
    assert_finished(operator, workers, epochs=3)
    assert not any("is repeated" in worker.log() for worker in workers)


def test_a_lost_worker_is_replaced(operate: Operate) -> None:
    """The survivors continue by themselves, then the replacement joins."""
    operator = operate(epochs=4)
    gate = Gate(operator.folder, 7)
    workers = operator.start_workers(3, faults={0: gate.fault, 1: {"place": "reducing", "step": 4}})
    operator.plan(workers)
    operator.finish([workers[1]])
    operator.until(gate.reached, "the survivors continue by themselves")
    replacement = operator.start_ready("w1", incarnation=1)
    operator.plan([workers[0], workers[2], replacement])
    operator.until_read([workers[0], workers[2]])
    gate.open()
    assert_finished(operator, [workers[0], workers[2], replacement], epochs=4)


def test_a_plan_with_the_same_members_needs_no_new_connections(operate: Operate) -> None:
    """The operator confirms the formation of the survivors: they adopt the new shares and do not even pause."""
    operator = operate(epochs=4)
    gate, later = Gate(operator.folder, 7), Gate(operator.folder, 10, name="x")
    faults = {0: gate.fault, 1: {"place": "reducing", "step": 4}, 2: later.fault}
    workers = operator.start_workers(3, faults=faults)
    operator.plan(workers)
    survivors = [workers[0], workers[2]]
    operator.until(gate.reached, "the survivors continue by themselves")
    operator.plan(survivors, shares=(4, 12))
    operator.until_read(survivors)
    gate.open()
    operator.until(later.reached, "the new shares are in force")
    generation = "heterotrain_plan_generation"
    operator.until(lambda: [w.metric(generation) for w in survivors] == [2, 2], "the status says so")
    later.open()
    assert_finished(operator, survivors, epochs=4)
    for worker in survivors:
        log = worker.log()
        assert "formation 2.0: the members of formation 1.1 continue with their connections, shares [4, 12]" in log
        assert log.count(" of 2, shares") == 1, log  # logged for each set of connections
        assert log.count("paused") == 1, log


@pytest.mark.parametrize("do", ["lose", "die"])
def test_a_loss_in_the_step_that_adopts_a_plan_with_the_same_members(operate: Operate, do: str) -> None:
    """The rank that has not committed the step is one formation behind the others; all survivors meet in the next."""
    operator = operate(epochs=3)
    gate, release = Gate(operator.folder, 4), operator.folder / "release"
    fault = {"place": "reduced", "step": 4, "do": do, "release": str(release)}
    workers = operator.start_workers(3, faults={0: gate.fault, 1: fault})
    operator.plan(workers)
    operator.until(gate.reached, "all are in step 4")
    operator.plan(workers, shares=(2, 6, 8))
    operator.until_read(workers)
    gate.open()
    if do == "lose":
        for worker in (workers[0], workers[2]):
            operator.until_step(worker, 5)
        release.touch()
    assert_finished(operator, workers if do == "lose" else [workers[0], workers[2]], epochs=3)
    assert "formation 2.0: the members of formation 1.0 continue" in workers[0].log() or do == "die"


def test_a_frozen_worker_is_excluded_and_fenced_when_it_resumes(operate: Operate) -> None:
    """A worker that does not answer is lost; when it resumes, it leaves without an effect on the others."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(operator.folder, 9)  # a peer has to be left to fence the frozen worker
    workers = operator.start_workers(3, faults={0: gate.fault}, slow_s=0.02)
    operator.plan(workers)
    operator.until_step(workers[0], 3)
    workers[2].signal(signal.SIGSTOP)
    # Not necessarily after the first vote, in which a survivor may still count the frozen worker as present.
    operator.until(lambda: "rank 0 of 2, shares" in workers[0].log(), "the others continue without it")
    workers[2].signal(signal.SIGCONT)
    operator.finish([workers[2]])
    gate.open()
    operator.finish(workers)
    assert_left(workers[2])
    assert_finished(operator, workers[:2])


def test_a_frozen_worker_is_not_waited_for_though_the_operator_names_it(operate: Operate) -> None:
    """Two of four freeze, so the others wait for a plan; it excludes only one of the two, and they continue alone."""
    operator = operate(peer_timeout_s=0.3)
    gate = Gate(operator.folder, 4)
    workers = held(operator, 4, gate)
    for frozen in workers[2:]:
        frozen.signal(signal.SIGSTOP)
    gate.open()
    for worker in workers[:2]:
        operator.until(lambda w=worker: "2 of 4 ranks are left" in w.log(), f"{worker.name} waits for a plan")  # type: ignore[misc]  # a default argument binds the loop's variable
    operator.plan(workers[:3], to=workers[:2])
    assert_finished(operator, workers[:2])


def test_a_joiner_that_dies_while_joining_is_survived(operate: Operate) -> None:
    """The plan names a worker that never arrives; the workers with the state are a majority of it and continue."""
    operator = operate(epochs=3, peer_timeout_s=0.3)
    gate = Gate(operator.folder, 4)
    workers = held(operator, 2, gate)
    joiner = operator.start_ready("w2")
    joiner.signal(signal.SIGKILL)
    operator.finish([joiner])
    operator.plan([*workers, joiner], to=workers)
    operator.until_read(workers)
    gate.open()
    assert_finished(operator, workers, epochs=3)


@pytest.mark.parametrize(
    ("count", "deaf", "leaves"), [(3, 2, 2), (3, 0, 1), (2, 0, 1), (2, 1, 1)],
    ids=["it leaves", "its peer leaves", "it stays of two", "it leaves of two"],
)  # fmt: skip
def test_a_worker_that_can_never_connect_to_one_peer(operate: Operate, count: int, deaf: int, leaves: int) -> None:
    """One of the two leaves, though all others reach both; the rest waits neither for a repair nor for the operator."""
    operator = operate(peer_timeout_s=0.3, epochs=20)  # the rest still trains when the other one asks who is left
    cut = {"place": "step", "step": 4, "do": "deafen", "release": str(operator.folder / "never")}
    gate = Gate(operator.folder, 5)  # no worker may finish before the cut is noticed
    faults = {number: cut if number == deaf else gate.fault for number in range(count)}
    workers = operator.start_workers(count, faults=faults, slow_s=0.02)
    operator.plan(workers)
    operator.until(lambda: "WARNING peer w" in workers[deaf].log(), "the cut is noticed")
    gate.open()
    operator.finish(workers)
    assert_left(workers[leaves])
    assert_finished(operator, [worker for number, worker in enumerate(workers) if number != leaves], epochs=20)
