"""Device-only behaviour in one process: the device's own time, its memory, and asynchronous copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import heterotrain
import pytest
import torch
from distributed.scripts import net, optimizer_of, problem
from heterotrain.data.batches import to_device
from heterotrain.data.loader_process import Workers
from heterotrain.data.prefetch import Prefetcher
from heterotrain.data.slices import EpochSlice
from heterotrain.data.sources import source_of
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.exchange.timeline import CudaTimeline, ReductionTimestamps
from heterotrain.steps import observer
from heterotrain.steps.clock import Clock, Phase
from heterotrain_core.contract import metrics as names
from prometheus_client import generate_latest

MIB = 1024 * 1024


def test_phases_measure_the_devices_work() -> None:
    """The device is busy for a while, then for three times as long; the host queues both immediately.

    Other processes may use the device in between, so that only limits are known: its fastest clock, and the host's.
    """
    clock = Clock(CudaTimeline(torch.device("cuda", 0)))
    cycles, fastest_hz = 50_000_000, 5e9
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    began = clock.now()
    torch.cuda._sleep(cycles)
    forward = clock.spent(Phase.FORWARD, began)
    torch.cuda._sleep(3 * cycles)
    clock.spent(Phase.BACKWARD, forward)
    assert not clock.is_over(), "recording phases must not wait for the device"
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - before_s
    assert clock.is_over()
    times = clock.read(ReductionTimestamps(), step_s=1.0)
    assert times.forward_s > cycles / fastest_hz
    assert times.backward_s > 3 * cycles / fastest_hz
    assert times.forward_s + times.backward_s < whole_s


def test_prefetched_batches_are_pinned() -> None:
    """Batches from worker processes are in page-locked memory, from which copies overlap with computing."""
    source = source_of(problem(32), collate=None, shuffle=False, seed=0)
    x, _y = Prefetcher(source, workers=Workers(count=1), pin=True).take(
        EpochSlice(0, 0, 8), lambda: iter([EpochSlice(0, 0, 8)])
    )
    assert x.is_pinned()
    assert torch.equal(x, problem(32).tensors[0][:8])


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_on_the_device_equal_those_on_the_cpu(workers: int) -> None:
    """The job in fp64, with and without worker processes, matches plain torch on the CPU with the same samples."""
    job = heterotrain.init(epochs=2, batch_samples=16)
    model = job.wrap(net())
    optimizer = job.optimizer(optimizer_of(model))
    twin = net()
    plain = optimizer_of(twin)
    for step in job.steps(problem(90), workers=workers):
        with step:
            plain.zero_grad()
            for x, y in step.micro_batches():
                assert x.is_cuda
                step.backward(((model(x) - y) ** 2).mean())
                ((twin(x.cpu()) - y.cpu()) ** 2).mean().backward()
            step.apply(optimizer)
            plain.step()
    for found, expected in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_graphs_train_to_the_weights_of_eager_passes(dropout: float) -> None:
    """Micro-batches of several sizes, with running statistics and random numbers; outputs stay as they were."""

    def trained(*, graphs: bool) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        job = heterotrain.init(epochs=3, batch_samples=16, micro_batch_samples=7, batch_norm="local")
        head = net()  # begins torch's random numbers
        body = (torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(dropout), head)
        model = job.wrap(torch.nn.Sequential(*body).double(), graphs=graphs)
        optimizer = job.optimizer(optimizer_of(model))
        outputs = []
        for step in job.steps(problem(90)):
            with step:
                for x, y in step.micro_batches():
                    outputs.append(model(x))
                    step.backward(((outputs[-1] - y) ** 2).mean())
                step.apply(optimizer)
        assert ("forward" in vars(model)) is graphs
        return model, [output.detach() for output in outputs]

    (eager, expected), (recorded, found) = trained(graphs=False), trained(graphs=True)
    forms: Any = recorded.forward
    assert len(forms._forms) >= 2, "nothing was recorded"
    for own, other in zip(recorded.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)
    for output, other in zip(found, expected, strict=True):
        torch.testing.assert_close(output, other, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_batches_go_to_the_device_unchanged_and_without_a_wait() -> None:
    """Also those that page-locked memory cannot hold as they are; torch raises at each wait."""
    images = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    batch = {
        "plain": torch.arange(6), "last": images.to(memory_format=torch.channels_last), "empty": torch.ones(0, 3),
        "nested": [torch.ones(()), ("text", torch.ones(2, 2))],
    }  # fmt: skip
    to_device(batch, torch.device("cuda"))  # gets page-locked memory, which is kept
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = to_device(batch, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "the host has waited"
    assert torch.equal(found["plain"].cpu(), batch["plain"])
    assert torch.equal(found["last"].cpu(), images)
    assert found["last"].is_contiguous(memory_format=torch.channels_last)
    assert found["empty"].shape == (0, 3)
    assert found["nested"][1][0] == "text"
    odd = [torch.ones(3, 1).expand(3, 4), torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2))]
    for there, here in zip(to_device(odd, torch.device("cuda")), odd, strict=True):
        assert torch.equal(there.cpu().to_dense(), here.to_dense())


def test_the_loss_is_read_while_the_device_still_computes() -> None:
    """Reading it does not wait for what was queued after it."""
    value = torch.full((), 2.5, dtype=torch.float64, device="cuda")
    copy = HostCopy(value)
    torch.cuda._sleep(500_000_000)
    value.fill_(7.0)
    assert float(copy) == 2.5
    assert not torch.cuda.current_stream().query(), "the host has waited for later work"
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "NAdam"])
def test_the_update_is_queued_before_the_host_waits(kind: str) -> None:
    """The device is still busy with the backward pass when a fused optimizer's step begins.

    Not in the first step, which reads the sums before it. In the second one, the device may load the gate's kernels.
    """
    job = heterotrain.init(epochs=1, batch_samples=16)
    model = job.wrap(net())
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = job.optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.01, **settings))
    assert optimizer.param_groups[0].get("fused") is (None if kind == "NAdam" else True)
    was_busy: list[bool] = []
    for step in job.steps(problem(64)):
        with step:
            for x, y in step.micro_batches():
                loss = ((model(x) - y) ** 2).mean()
                loss.register_hook(lambda _gradient: torch.cuda._sleep(300_000_000))
                step.backward(loss)
            optimizer.step = noting(optimizer.step, was_busy)  # type: ignore[method-assign]  # what the update calls
            result = step.apply(optimizer, clip_norm=0.1)
            del optimizer.step
        assert result.gradient_norm > 0
        assert not result.skipped
    assert was_busy[0] is False
    assert was_busy[2:] == 2 * [kind != "NAdam"]


def noting(step: Callable[[], object], was_busy: list[bool]) -> Callable[[], object]:
    """Return a step of an optimizer that notes whether the device still has work."""

    def around() -> object:
        was_busy.append(not torch.cuda.current_stream().query())
        return step()

    return around


def test_a_gradient_that_is_not_finite_is_skipped_behind_the_gate() -> None:
    """Weights, moments and counts keep their bits, and the next step counts as if it had not been."""
    job = heterotrain.init(epochs=1, batch_samples=16, on_non_finite="skip")
    model = job.wrap(net())
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    skipped, kept = [], []
    for step in job.steps(problem(64)):
        before = [value.clone() for value in (*model.parameters(), *states_of(optimizer))]
        with step:
            for x, y in step.micro_batches():
                output = model(x)
                if step.number == 2:
                    output.register_hook(lambda gradient: gradient * float("inf"))
                step.backward(((output - y) ** 2).mean())
            skipped.append(step.apply(optimizer).skipped)
        kept.append(all(map(torch.equal, before, (*model.parameters(), *states_of(optimizer)))))
    assert skipped == kept == [False, False, True, False]
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())


@pytest.mark.parametrize("spoil", [-1, 3])
def test_the_host_goes_on_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch, spoil: int) -> None:
    """With ``confirm="late"``, the next step begins before the update has happened; a spoilt one is repeated first.

    Weights, moments and counts are those of steps that are confirmed at once, to the last bit.
    """
    monkeypatch.setattr(observer, "is_measured", lambda _number, _every: False)
    found, went_on = [], []
    for confirm in ("now", "late"):
        job = heterotrain.init(epochs=1, batch_samples=16, on_non_finite="skip")
        model = job.wrap(net())
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in job.steps(problem(96), confirm=confirm):
            with step:
                for x, y in step.micro_batches():
                    output = model(x)
                    if step.number == spoil:
                        output.register_hook(lambda gradient: gradient * float("inf"))
                    loss = ((output - y) ** 2).mean()
                    loss.register_hook(lambda _gradient: torch.cuda._sleep(300_000_000))
                    step.backward(loss)
                step.apply(optimizer)
                went_on += [not torch.cuda.current_stream().query()] if step.number == 2 and confirm == "late" else []
            assert confirm == "late" or step.committed
        assert job._training.progress.steps == 6
        found.append([value.clone() for value in (*model.parameters(), *states_of(optimizer))])
    assert went_on == [True]
    assert all(map(torch.equal, *found))


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return moments and counts."""
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.fixture
def little_memory() -> Iterator[int]:
    """Limit this process to 1 GiB of device memory beyond its present use; yield the limit in bytes."""
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 1024 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_running_out_of_memory_halves_the_micro_batch(little_memory: int) -> None:
    """A row takes 32 MiB in forward and as much in backward, so 64 rows do not fit; yet every step is committed."""
    job = heterotrain.init(epochs=1, batch_samples=64)
    model = job.wrap(torch.nn.Linear(1, 8 * MIB, bias=False))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    sizes = []
    for step in job.steps(torch.utils.data.TensorDataset(torch.ones(192, 1))):
        rows = []
        with step:
            for (x,) in step.micro_batches():
                rows.append(len(x))
                step.backward(model(x).square().mean())
            step.apply(optimizer)
        if step.committed:
            sizes.append(rows)
    assert [sum(rows) for rows in sizes] == [64, 64, 64]
    assert job._loop._attempts.cap_samples == max(sizes[-1]) < 64
    metrics = generate_latest(job._report.registry).decode()
    assert names.OUT_OF_MEMORY in metrics
    peaks = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(names.PEAK_MEMORY)]
    assert 0 < max(peaks) <= little_memory
