"""NCCL on a card: what is queued without waiting, left behind, aborted and freed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.nccl_scripts import connected
from cuda.shared_card import card
from distributed.harness import LIMIT_S, START_S, Operator, Worker, Zygote, assert_finished
from distributed.scripts import net
from distributed.setups import distance, twin
from distributed.training_setup import TrainingSetup
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.connection_setup import c10d
from heterotrain.network.nccl import abort, release
from heterotrain.network.sums import NcclSum
from heterotrain.numerics.batch_norm import BatchNormContext, synchronise
from heterotrain.numerics.fused import take_step

Operate = Callable[..., Operator]


@pytest.mark.parametrize(("script", "marks"), [("left_behind", ["left", "summed"]), ("many_formations", ["released"])])
def test_groups_come_and_go(zygote: Zygote, tmp_path: Path, script: str, marks: list[str]) -> None:
    """A connect without its peer holds nobody and no later group; communicators, memory and threads are freed."""
    inbox = zygote.start(str(tmp_path), {
        "environ": {}, "output": str(tmp_path / "output"), "script": f"cuda.nccl_scripts:{script}",
        "arguments": {"out": str(tmp_path)},
    })  # fmt: skip
    inbox.get(timeout=START_S)
    code = inbox.get(timeout=LIMIT_S)["code"]
    assert code == 0, (tmp_path / "output").read_text()
    assert all((tmp_path / mark).exists() for mark in marks)


def test_the_host_does_not_wait_for_operations_of_an_aborted_group() -> None:
    """The device is busy before the sum; what follows on the stream comes after it."""
    group, flat = connected("busy"), torch.ones(8, device="cuda")
    torch.cuda._sleep(2_000_000_000)
    work = group.allreduce([flat], c10d.AllreduceOptions())
    aborts = abort([group], AbortFlag())
    NcclSum(work).settle()
    assert not torch.cuda.current_stream().query(), "the host has waited"
    torch.cuda.synchronize()
    groups = [group]
    del group
    release(groups, aborts)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_step_is_reduced_tested_and_updated_without_waiting_for_the_device() -> None:
    """Only then may the host wait, once; torch raises at each other wait. A closed gate keeps all bits."""
    torch.cuda.set_device(0)
    groups = [connected("step")]
    group: Any = SimpleNamespace(
        world_size=2,
        wait=lambda work, _what: work.wait(),
        all_reduce=lambda flat, _owners: NcclSum(groups[0].allreduce([flat], c10d.AllreduceOptions())),
        flag=AbortFlag(is_pinned=True),
    )
    model = net().cuda()
    reducer = Reducer(model, bucket_bytes=1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(4, 6, dtype=torch.float64, device="cuda")
    for bad in (None, "nothing", "a value", "the flag"):
        if bad == "the flag":
            group.flag.lift()
        before = bits_of(optimizer)
        reducer.begin()
        reducer.arm(group)
        loss = model(x).sum() * (float("nan") if bad == "a value" else 1.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
            reducer.flush()
            if reducer.exchange.is_held:
                reducer.exchange.release()
            reducer.wait()
            gate = reducer.gate()
            assert gate is not None
            if bad is not None:  # else this is the optimizer's first step
                gate.clip(0.5)
                take_step(optimizer, 1.0, gate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert gate.read().was_open is (bad in (None, "nothing"))
        assert reducer.is_finite() is (bad != "a value")
        if bad is None:
            optimizer.step()
        else:
            assert all(map(torch.equal, before, bits_of(optimizer))) is (bad != "nothing")
        torch.cuda.synchronize()
        assert len(reducer.transfers_s()) == len(reducer.buckets)
        assert all(0.0 < seconds < 60.0 for seconds in reducer.transfers_s())
    release(groups, [])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_statistics_of_layers_are_summed_without_waiting_for_the_device() -> None:
    """Torch raises at each wait. The other rank adds nothing, so the results are those of torch's own layer."""
    torch.cuda.set_device(0)
    groups = [connected("layers")]
    group: Any = SimpleNamespace(rank=0, world_size=2, wait=lambda work, _what: work.wait())
    group.all_reduce = lambda flat: NcclSum(groups[0].allreduce([flat], c10d.AllreduceOptions()))
    plain = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)).double().cuda()
    model = copy.deepcopy(plain)
    synchronise(model, BatchNormContext(group=group, on_device=True))
    x = torch.randn(8, 6, dtype=torch.float64, device="cuda")
    for waits in (True, False, False):  # the first pass loads kernels
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            model(x).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain(x).square().sum().backward()
    for own, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)
    release(groups, [])


def bits_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of weights, moments and counts."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*weights, *states)]


def start(operator: Operator, number: int, *, ranks: int, gpu: bool = True, **arguments: Any) -> Worker:
    """Start a worker with one rank; without ``gpu``, it computes on a CPU."""
    place = card(number, ranks=ranks) if gpu else {"gpu": ""}
    return operator.start(f"w{number}", script="cuda.shared_card:train", **place, **arguments)


@pytest.mark.parametrize("place", ["launched", "reducing", "reduced"])
@pytest.mark.parametrize("do", ["die", "stop"])
def test_a_rank_is_lost_in_a_sum_by_nccl(operate: Operate, place: str, do: str) -> None:
    """Survivors abort, form again and finish, also where the lost rank keeps its connections open."""
    operator = operate()
    fault = {"step": 4, "place": place, "do": do}
    workers = [start(operator, i, ranks=3, fault=fault if i == 2 else None) for i in range(3)]
    operator.until_ready(*workers)
    operator.plan(workers)
    assert_finished(operator, workers[:2])
    assert "by gloo" not in workers[0].log(), workers[0].log()


@pytest.mark.parametrize("dies", [False, True], ids=["undisturbed", "loss inside"])
def test_batch_norm_over_the_global_batch_by_nccl(operate: Operate, dies: bool) -> None:
    """Uneven and empty shares; a rank dies while the devices of the others wait for its statistics."""
    setup, operator = TrainingSetup(batch_norm=True), operate()
    fault = {"place": "statistics", "step": 4} if dies else None
    workers = []
    for i in range(3):
        arguments: dict[str, Any] = {"setup": asdict(setup), "fault": fault if i == 1 else None, **card(i, ranks=3)}
        workers.append(operator.start(f"w{i}", script="cuda.shared_card:train_setup", **arguments))
    operator.until_ready(*workers)
    operator.plan(workers, shares=(9, 7, 0))
    operator.finish(workers)
    expected = twin(setup, epochs=2)
    for worker in workers:
        if not (dies and worker is workers[1]):
            assert distance(operator.weights(worker), expected.weights) < 1e-10, worker.log()


def test_ranks_join_and_leave_a_job_by_nccl(operate: Operate) -> None:
    """One joins two, gets the state from their device memory, and one of the first leaves."""
    operator = operate(epochs=3)
    workers = [start(operator, i, ranks=3, slow_s=0.02) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(11, 5))
    operator.until_step(workers[0], 3)
    workers.append(start(operator, 2, ranks=3, slow_s=0.02))
    operator.until_ready(workers[2])
    operator.plan(workers, shares=(4, 9, 3))
    operator.until_step(workers[2], 9)
    operator.plan(workers[1:], to=workers, shares=(12, 4))
    assert_finished(operator, workers[1:], epochs=3)
    assert "by gloo" not in workers[1].log(), workers[1].log()


@pytest.mark.parametrize("lost", [0, 3])
def test_gpus_and_cpus_add_up_in_two_levels(operate: Operate, lost: int) -> None:
    """Two GPUs by NCCL, two CPUs by gloo; the head of the island or a CPU is lost."""
    operator = operate()
    fault = {"step": 4, "place": "launched"}
    workers = [start(operator, i, ranks=2, gpu=i < 2, fault=fault if i == lost else None) for i in range(4)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(7, 5, 3, 1))
    assert_finished(operator, [worker for i, worker in enumerate(workers) if i != lost])
    assert "by nccl among ranks 0, 1, and by gloo to all others" in workers[1].log()
