"""What a script sees of a step, on several ranks and through losses: results, leader, hooks, several passes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest
import torch
from distributed.harness import Gate, Operator, Worker, check_weights
from distributed.scripts import batches, net, optimizer_of, problem
from distributed.step_scripts import HeadFirst, dropping, events, marks_of
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from support import passes

Operate = Callable[..., Operator]
SCRIPT = "distributed.step_scripts:{}"


def run(
    operator: Operator, script: str, *, faults: dict[int, dict[str, object]], kind: str = "", **plan: object
) -> list[Worker]:
    """Train on three workers with one plan to the end, and return them; ``kind`` is an argument of some scripts."""
    more = {"kind": kind} if kind else {}
    workers = operator.start_workers(3, faults=faults, script=SCRIPT.format(script), **more)
    operator.plan(workers, **plan)
    operator.finish(workers)
    return workers


def test_every_rank_gets_the_result_of_the_global_batch(operate: Operate) -> None:
    """Loss and norm are those of plain torch on the whole batch, on a rank without samples, too."""
    operator = operate()
    run(operator, "watch", faults={}, shares=(11, 0, 5), micro=(4, 0, 0))
    model, (x, y), expected = net(), problem(96).tensors, []
    optimizer = optimizer_of(model)
    for _, chosen in batches(epochs=2):
        loss = ((model(x[chosen]) - y[chosen]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        optimizer.step()
        expected.append((float(loss.detach()), norm))
    for name in ("w0", "w1", "w2"):
        seen = events(operator.folder, name, "step")
        assert [(s["loss"], s["norm"]) for s in seen] == [pytest.approx(pair, rel=1e-10) for pair in expected]
        assert {(s["rate"], s["samples"], s["retry"]) for s in seen} == {(0.02, 16, False)}


def test_one_rank_leads_at_a_time_and_the_next_one_is_told(operate: Operate) -> None:
    """Nobody leads before the members have met. The leader sets up once, and again only where a new one takes over."""
    operator = operate()
    workers = run(operator, "watch", faults={0: {"place": "step", "step": 5}})
    assert [worker.code for worker in workers] == [-signal.SIGKILL, 0, 0]
    seen = {worker.name: events(operator.folder, worker.name, "step") for worker in workers}
    assert [events(operator.folder, name, "init")[0]["leads"] for name in seen] == [False] * 3
    assert [[e["leads"] for e in events(operator.folder, name, "leader")] for name in seen] == [[True], [True], []]
    for number in range(12):
        leaders = [name for name, steps in seen.items() for s in steps if s["number"] == number and s["leads"]]
        assert leaders == (["w0"] if number < 5 else ["w1"])
    assert [s["number"] for s in seen["w1"] if s["retry"]] == [5]
    assert all("use @job.on_leader_change" in worker.log() for worker in workers)


@pytest.mark.parametrize("place", ["hook", "hook's middle"])
def test_hooks_every_few_steps_survive_a_loss(operate: Operate, place: str) -> None:
    """The survivors call the interrupted hook again, for the same step, and divide the data set among themselves."""
    operator = operate()
    workers = run(operator, "watch", faults={1: {"place": place, "step": 5}})
    assert [worker.code for worker in workers] == [0, -signal.SIGKILL, 0]
    for name in ("w0", "w2"):
        seen = [(e["steps"], e["rows"], e["training"]) for e in events(operator.folder, name, "hook")]
        assert seen == [(5, 33.0, False), (10, 33.0, False)]
        assert [s["number"] for s in events(operator.folder, name, "step")] == list(range(12))


@pytest.mark.parametrize(
    ("kind", "place"),
    [("gan", "never"), ("sam", "never"), ("gan", "first"), ("gan", "between"), ("gan", "second"), ("sam", "second")],
)
def test_several_passes_train_like_one_process(operate: Operate, kind: str, place: str) -> None:
    """Uneven and empty shares, micro-batches, and a rank that is lost in any part of the step: all equal 1e-10."""
    operator = operate()
    fault = {2: {"place": place, "step": 4}}
    workers = run(operator, "several_passes", faults=fault, kind=kind, shares=(9, 0, 7), micro=(4, 0, 3))
    expected = passes.plain(kind, samples=90, epochs=2, batch=16)
    if place != "never":
        assert workers.pop().code == -signal.SIGKILL
    check_weights(operator, workers, expected)


def test_ranks_agree_on_the_order_in_which_gradients_arrive(operate: Operate) -> None:
    """The lowest rank has no share; a lost rank is replaced by one that has seen no gradient yet."""
    operator = operate(epochs=4)
    gate = Gate(operator.folder, 9)
    script = SCRIPT.format("head_first")
    workers = operator.start_workers(3, faults={0: gate.fault, 2: {"place": "reducing", "step": 5}}, script=script)
    operator.plan(workers, shares=(0, 9, 7))
    operator.until(gate.reached, "the survivors continue by themselves")
    operator.finish([workers.pop()])
    workers.append(operator.start_ready("w3", script=script))
    operator.plan(workers, shares=(4, 5, 7))
    operator.until_read(workers[:2])
    gate.open()
    model = HeadFirst()
    optimizer, (x, y) = optimizer_of(model), problem(96).tensors
    for _, chosen in batches(epochs=4):
        optimizer.zero_grad()
        ((model(x[chosen]) - y[chosen]) ** 2).mean().backward()
        optimizer.step()
    check_weights(operator, workers, model.state_dict())
    for worker in workers:
        seen = events(operator.folder, worker.name, "step")
        assert all(step["left"] == [6] * len(step["left"]) for step in seen if step["number"] == 0)
        late = [step["left"] for step in seen if step["number"] > 12 and step["share"]]
        assert late
        assert all(left[0] <= 4 and left == sorted(left) and left[-1] == 6 for left in late)


@pytest.mark.parametrize("place", ["never", "computed"])
def test_compute_trains_like_one_process_with_dropout(operate: Operate, place: str) -> None:
    """Three uneven workers, one without samples, also through a loss: the weights of plain torch to 1e-10."""
    operator = operate()
    faults: dict[int, dict[str, object]] = {2: {"place": place, "step": 4}}
    workers = run(operator, "compute", faults=faults, shares=(12, 0, 4), micro=(4, 4, 4))
    cpu = torch.device("cpu")
    units = units_of(built(dropping), None)
    InitialValues(seed=0, device=cpu).fill(units)
    model, draws, (x, y) = units.model, UnitDraws(units, seed=0, device=cpu), problem(96).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for number, (_, chosen) in enumerate(batches(epochs=2)):
        optimizer.zero_grad()
        for start in range(0, 16, 4):
            part = chosen[start : start + 4]
            with draws.at(number, start):
                (torch.nn.functional.mse_loss(model(x[part]), y[part]) / 4).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.hypot(*(float(gradient.norm()) for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 1.0 / norm))
        optimizer.step()
    if place != "never":
        assert workers.pop().code == -signal.SIGKILL
    check_weights(operator, workers, model.state_dict())


def test_two_denominators_are_those_of_the_global_batch(operate: Operate) -> None:
    """Counted by ``job.sum`` over lists of micro-batches, one of them empty, some left out, and through a loss."""
    operator = operate()
    faults: dict[int, dict[str, object]] = {2: {"place": "reducing", "step": 4}}
    workers = run(operator, "counted", faults=faults, shares=(9, 0, 7), micro=(4, 0, 3))
    assert workers.pop().code == -signal.SIGKILL
    model, (x, y) = net(), problem(96).tensors
    optimizer = optimizer_of(model)
    for _, chosen in batches(epochs=2):
        error, (first, second) = model(x[chosen]) - y[chosen], marks_of(x[chosen])
        optimizer.zero_grad()
        loss = (error**2 * first).sum() / first.sum() + (error.abs() * second).sum() / second.sum().clamp(min=1)
        loss.backward()
        optimizer.step()
    check_weights(operator, workers, model.state_dict())


def test_a_sum_over_samples_is_refused_where_each_rank_has_one_size(operate: Operate) -> None:
    """All ranks end with one sentence in the first step, also the one without samples."""
    operator = operate()
    for worker in run(operator, "summed", faults={}, shares=(9, 0, 7)):
        assert worker.code == 1
        assert worker.outcome is not None
        assert "step 0: the loss is a sum over samples" in worker.outcome.reason
        assert "micro-batches of 7 and 9 samples" in worker.outcome.reason
