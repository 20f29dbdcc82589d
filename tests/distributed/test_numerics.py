"""Number formats, compression, learning rates, BatchNorm and little memory, on several ranks."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Gate, Operator, Worker
from distributed.setups import Twin, cuts, distance, twin
from distributed.training_setup import TrainingSetup
from heterotrain.exchange.flat.compression import ROUNDOFF
from support.lineage import lineage

Operate = Callable[..., Operator]


def start(operator: Operator, count: int, setup: TrainingSetup, **arguments: Any) -> list[Worker]:
    """Start workers with a training setup, and wait until they are ready."""
    return operator.start_workers(count, script="distributed.setups:train", setup=asdict(setup), **arguments)


def records(operator: Operator, worker: Worker) -> dict[str, Any]:
    """Return a worker's records of its steps."""
    assert worker.code == 0, worker.log()
    found: dict[str, Any] = json.loads((operator.folder / f"{worker.name}.json").read_text())
    return found


def each_once(operator: Operator, setup: TrainingSetup, epochs: int) -> bool:
    """Return whether every sample of every epoch has entered the weights once."""
    found = lineage(operator.folder / "samples")
    return all(sorted(found[epoch]) == list(range(setup.samples)) for epoch in range(epochs))


def same_bits(operator: Operator, workers: list[Worker]) -> bool:
    """Return whether all these workers ended with identical weights."""
    first, *others = (operator.weights(worker) for worker in workers)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


# -- BatchNorm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_sums", [False, True], ids=["by rows", "by sums"])
@pytest.mark.parametrize("dies", [False, True], ids=["undisturbed", "loss inside"])
def test_batch_norm_covers_the_global_batch(operate: Operate, dies: bool, by_sums: bool) -> None:
    """Uneven and empty shares, a short last step, and a rank that dies while the others wait for its statistics."""
    setup = TrainingSetup(batch_norm=True)
    operator = operate()
    faults = {1: {"place": "statistics", "step": 4}} if dies else {}
    workers = start(operator, 4, setup, faults=faults, by_sums=by_sums)
    operator.plan(workers, shares=(8, 3, 0, 5), probe=((0, 9, 0, 7), (1, 1, 1, 13)), probe_steps=1)
    operator.finish(workers)
    expected = twin(setup, epochs=2)
    for worker in workers:
        if dies and worker is workers[1]:
            assert worker.code == -9
            continue
        assert distance(operator.weights(worker), expected.weights) < 1e-10, worker.log()
        assert [s["loss"] for s in records(operator, worker)["steps"]] == pytest.approx(expected.losses, rel=1e-10)
    assert each_once(operator, setup, 2)


def test_batch_norm_is_not_cut_into_micro_batches(operate: Operate) -> None:
    """A micro-batch has other statistics, so the worker fails with a message that names the layer and alternatives."""
    operator = operate()
    (worker,) = start(operator, 1, TrainingSetup(batch_norm=True))
    operator.plan([worker], shares=(16,), micro=(4,))
    operator.finish([worker])
    assert worker.code == 1
    assert worker.outcome is not None
    assert "layer '1' is a BatchNorm" in worker.outcome.reason
    assert "GroupNorm" in worker.outcome.reason


@pytest.mark.parametrize("dies", [False, True], ids=["undisturbed", "a loss"])
def test_local_batch_norm_gives_every_rank_the_same_running_statistics(operate: Operate, dies: bool) -> None:
    """Shares, one empty, are cut into micro-batches, each with its own statistics; also when a rank is lost."""
    setup, micro = TrainingSetup(batch_norm=True, local=True), (3, 0, 4)
    operator = operate()
    workers = start(operator, 3, setup, faults={2: {"place": "reducing", "step": 4}} if dies else {})
    operator.plan(workers, shares=(9, 0, 7), micro=micro, probe=((4, 5, 7), (1, 15, 0), (9, 0, 7)), probe_steps=1)
    operator.finish(workers)
    if dies:
        assert workers.pop().code == -signal.SIGKILL
    for worker in workers:
        assert worker.code == 0, worker.log()
        found = operator.weights(worker)
        assert all(torch.equal(value, operator.weights(workers[0])[name]) for name, value in found.items())
    model, (x, y) = setup.model(), setup.data().tensors
    optimizer, layers = setup.optimizer(model), [m for m in model if isinstance(m, torch.nn.BatchNorm1d)]
    for shares, ids in committed(operator.folder / "samples"):
        optimizer.zero_grad()
        before, changes = [copy.deepcopy(layer.state_dict()) for layer in layers], [[0.0, 0.0] for _ in layers]
        # A lost rank changes only the shares: members keep their micro-batches.
        for part in torch.tensor(ids).split(cuts(shares, micro[: len(shares)])):
            model.train(len(part) > 1)  # one value has no variance
            (((model(x[part]) - y[part]) ** 2).sum() / len(ids)).backward()
            for layer, own, change in zip(layers, before, changes, strict=True):
                for place, name in enumerate(("running_mean", "running_var")):
                    change[place] = change[place] + (getattr(layer, name) - own[name]) * len(part) / len(ids)
                layer.load_state_dict({**layer.state_dict(), **{n: v for n, v in own.items() if "running" in n}})
        for layer, change in zip(layers, changes, strict=True):
            layer.running_mean += change[0]
            layer.running_var += change[1]
        optimizer.step()
    expected = {n: v for n, v in model.state_dict().items() if "tracked" not in n}
    found = {n: v for n, v in operator.weights(workers[0]).items() if "tracked" not in n}
    assert distance(found, expected) < 1e-10


def committed(folder: Path) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return shares and samples of each committed step, from the logs of all ranks."""
    lines = [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]
    newest = {line["step"]: line for line in sorted(lines, key=lambda line: line["formation"])}
    return [(tuple(newest[step]["shares"]), newest[step]["batch_ids"]) for step in sorted(newest)]


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["BF16", "FP16"])
def test_half_precision_is_the_same_on_all_ranks(operate: Operate, tmp_path: Path, precision: str) -> None:
    """Forward pass and exchange use the format; skipped steps, loss scale and weights agree, also on a late joiner."""
    setup = TrainingSetup(dtype="float32", samples=96)
    operator, gate = operate(precision=precision, compression=precision, epochs=4), Gate(tmp_path, 14)
    workers = start(operator, 2, setup, faults={0: gate.fault})
    operator.plan(workers, shares=(11, 5), micro=(4, 0))
    operator.until(gate.reached, "step 14")
    workers += start(operator, 1, setup, prefix="late")
    operator.plan(workers, shares=(6, 5, 5))
    operator.until_read(workers[:2])
    gate.open()
    operator.finish(workers)
    first, second, late = (records(operator, worker) for worker in workers)
    assert first["formats"] == late["formats"] == [{"BF16": "torch.bfloat16", "FP16": "torch.float16"}[precision]]
    assert first["steps"] == second["steps"]
    assert first["steps"][-len(late["steps"]) :] == late["steps"]
    assert 0 < len(late["steps"]) < 10
    assert same_bits(operator, workers)
    assert each_once(operator, setup, 4)
    exact = twin(setup, epochs=4)
    skipped = [s["step"] for s in first["steps"] if s["skipped"]]
    if precision == "BF16":
        assert distance(operator.weights(workers[0]), exact.weights) < 0.03
        assert not skipped
    else:  # gradients times 65536 overflow at first, so the scale comes down with each skipped step
        scales = [s["loss_scale"] for s in first["steps"]]
        assert 0 in skipped
        assert scales == [65536.0 * 0.5 ** sum(before < step for before in skipped) for step in range(24)]
        later = twin(setup, epochs=4, rate=lambda step, *_: float(step not in skipped))
        assert [s["loss"] for s in first["steps"]] == pytest.approx(later.losses, rel=0.01)


# -- compression ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["FP16", "BF16"])
def test_compressed_gradients_are_within_the_bound(operate: Operate, compression: str) -> None:
    """For each element of each bucket in each step; a spike is sent uncompressed; all ranks have the same sum."""
    setup = TrainingSetup(dtype="float32", samples=96, spike=(5, 1e6), clip_norm=1.0)
    operator = operate(compression=compression)
    workers = start(operator, 3, setup, record=True)
    operator.plan(workers, shares=(9, 0, 7))
    operator.finish(workers)
    ranks = [torch.load(operator.folder / f"{w.name}.buckets", weights_only=True) for w in workers]
    assert [len(rank) for rank in ranks] == [12, 12, 12]
    for number, attempts in enumerate(zip(*ranks, strict=True)):
        for index in range(len(attempts[0]["own"])):
            own = torch.stack([a["own"][index] for a in attempts]).double()
            sums = [a["sum"][index] for a in attempts]
            assert torch.equal(sums[0], sums[1])
            assert torch.equal(sums[0], sums[2])
            error = (sums[0].double() - own.sum(0)).abs()
            packed = bool(attempts[0]["packed"][index])
            assert packed == (compression == "BF16" or number > 0)
            # In fp16, the last sum's largest element was scaled to between 2^7 and 2^8, so 1/s is at most 2^-7 of it.
            tiny = 3 * 2.0**-32 * float(ranks[0][number - 1]["sum"][index].abs().max()) if number else 0.0
            allowed = 3 * ROUNDOFF[compression] * own.abs().sum(0) * 1.01 + (tiny if compression == "FP16" else 0.0)
            if compression == "FP16" and number in (0, 5):  # no scale yet; did not fit
                allowed = 3 * 2.0**-24 * own.abs().sum(0)
            assert bool((error <= allowed).all()), (number, index)
            if compression == "BF16" or number not in (0, 5):
                assert float(error.sum()) > 0
    assert same_bits(operator, workers)


# -- learning rates ------------------------------------------------------------------------------------------------


def test_a_larger_batch_warms_up_to_its_rate(operate: Operate, tmp_path: Path) -> None:
    """Linear rule: twice the batch, four steps to twice the rate, schedules twice as fast, also on a late joiner."""
    setup = TrainingSetup(samples=96, decay=0.95)
    operator = operate(epochs=4, learning_rate_scaling="Linear", learning_rate_warmup_samples=128)
    first, second = Gate(tmp_path, 2), Gate(tmp_path, 7)
    workers = start(operator, 2, setup, faults={0: first.fault, 1: second.fault})
    operator.plan(workers, shares=(10, 6))
    operator.until(first.reached, "step 2")
    operator.plan(workers, new_generation=False, batch_samples=32, shares=(20, 12))
    operator.until_read(workers)
    first.open()
    operator.until(second.reached, "step 7")
    workers += start(operator, 1, setup, prefix="late")
    operator.plan(workers, batch_samples=32, shares=(10, 12, 10))
    operator.until_read(workers[:2])
    second.open()
    operator.finish(workers)
    rates = [1.0] * 6 + [1.0, 1.25, 1.5, 1.75] + [2.0] * 5
    expected = twin(
        setup, epochs=4, batch=lambda epoch: 32 if epoch else 16, rate=lambda step, *_: rates[step],
        schedule=lambda epoch: 2 if epoch else 1,
    )  # fmt: skip
    for worker in workers:
        found = [s["rate"] for s in records(operator, worker)["steps"]]
        assert found == rates[-len(found) :]
        assert distance(operator.weights(worker), expected.weights) < 1e-10
    assert len(records(operator, workers[2])["steps"]) < 8


class AdaScale:
    """The rule by its definition, from each micro-batch's own gradient; for AdamW, from preconditioned gradients."""

    def __init__(self, sizes: list[int], *, base: int) -> None:
        self._sizes, self._base = sizes, base
        self._means = [0.0, 0.0, 0.0]
        self.factors: list[float] = []

    def __call__(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> float:
        """Return the factor for a step from the steps before the last one; then evaluate this step's gradients."""
        signal, noise, weight = self._means
        batch, factor = len(x), 1.0
        if weight >= 1 - 0.999**10.001:
            phi = max(0.0, noise / signal) if signal > noise / (1e4 * batch) else 1e4 * batch
            factor = ((phi / self._base + 1) / (phi / batch + 1)) ** 0.5
        self.factors.append(factor)
        if hasattr(self, "_late"):
            self._add(*self._late)
        if step > 0:
            self._late = self._look(model, optimizer, x, y)
        return factor

    def _look(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[float, float]:
        def square(a: torch.Tensor, b: torch.Tensor) -> float:
            gradients = torch.autograd.grad(((model(a) - b) ** 2).mean(), list(model.parameters()))
            total = 0.0
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                state = optimizer.state[parameter]
                root = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt()
                total += float(((gradient / (root + 1e-8)) ** 2).sum())
            return total

        batch, whole = len(x), square(x, y)
        parts = zip(self._sizes, x.split(self._sizes), y.split(self._sizes), strict=True)
        weighted = sum(size * square(a, b) for size, a, b in parts)
        variance = (weighted - batch * whole) / (len(self._sizes) - 1)
        return whole - variance / batch, variance

    def _add(self, signal: float, noise: float) -> None:
        keep = 0.999 ** (sum(self._sizes) / self._base)
        self._means = [
            keep * old + (1 - keep) * new for old, new in zip(self._means, (signal, noise, 1.0), strict=True)
        ]


def test_adascale_follows_preconditioned_noise(operate: Operate, tmp_path: Path) -> None:
    """AdamW at four times the base batch: factor and weights match the rule's definition."""
    setup = TrainingSetup(samples=128, adam=True)
    operator = operate(epochs=4, batch_samples=8, learning_rate_scaling="AdaScale", learning_rate_warmup_samples=0)
    workers = start(operator, 2, setup)
    operator.plan(workers, batch_samples=32, shares=(21, 11), micro=(8, 0))
    operator.finish(workers)
    rule = AdaScale(cuts((21, 11), (8, 0)), base=8)
    expected: Twin = twin(setup, epochs=4, batch=lambda _epoch: 32, rate=rule)
    for worker in workers:
        assert [s["rate"] for s in records(operator, worker)["steps"]] == pytest.approx(rule.factors, rel=1e-9)
        assert distance(operator.weights(worker), expected.weights) < 1e-9
    assert rule.factors[0] == 1.0
    assert 1.05 < rule.factors[-1] < 2.0


# -- memory --------------------------------------------------------------------------------------------------------


def test_little_memory_on_some_ranks_costs_only_time(operate: Operate, tmp_path: Path) -> None:
    """One rank runs out of memory in backward, during the others' reduction, and another one in forward."""
    setup = TrainingSetup()
    operator, gate = operate(), Gate(tmp_path, 3)
    workers = [
        *start(operator, 1, setup, prefix="backward", rows={"backward": 3}),
        *start(operator, 1, setup, prefix="forward", rows={"forward": 2}),
        *start(operator, 1, setup, faults={0: gate.fault}, rows={"forward": 100}),
    ]
    operator.plan(workers, shares=(8, 5, 3))
    operator.until(gate.reached, "step 3")
    caps = [worker.metric("heterotrain_micro_batch_cap_samples") for worker in workers]
    assert caps == [2.0, 2.0, None]
    summed = [worker.metric("heterotrain_gradient_bytes_total") for worker in workers]
    gate.open()
    operator.finish(workers)
    expected = twin(setup, epochs=2)
    a_step = sum(weight.nbytes for weight in expected.weights.values())
    assert all(count and count % a_step == 0 for count in summed), "whole steps of all gradients"
    for worker in workers:
        found = operator.weights(worker)
        assert (
            distance(
                {k.replace("5.", "4.") if k.startswith("5.") else k: v for k, v in found.items()}, expected.weights
            )
            < 1e-10
        )
    assert "out of memory with micro-batches of 8 samples: using 4" in workers[0].log()
    assert "out of memory with micro-batches of 4 samples: using 2" in workers[0].log()
    assert "step 0 is repeated: a rank could not finish its part" in workers[2].log()
    assert each_once(operator, setup, 2)
