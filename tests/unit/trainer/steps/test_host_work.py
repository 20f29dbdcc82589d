"""What a step costs the host, in counts that do not depend on other load."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.exchange import gate as gates
from heterotrain.steps import observer
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 8
WARM_UP_STEPS, STEPS = 40, 31
MOST_CALLS = 190
"""Python calls of a step beyond those of a plain loop; some are of the tests' own clock. 274 before most were cut."""


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1 << 16

    def __getitems__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(ids), 32), torch.zeros(len(ids), dtype=torch.int64)


def mlp() -> torch.nn.Module:
    layers = (torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU())
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 10))


def plain() -> Iterator[None]:
    model, data = mlp(), Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)  # as the job chooses
    while True:
        x, y = data.__getitems__(list(range(SAMPLES)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def ours(*, fused: bool | None = None) -> Iterator[None]:
    job = heterotrain.init(epochs=1, batch_samples=SAMPLES)
    model = job.wrap(mlp())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused))
    for step in job.steps(Numbers(), collate=lambda batch: batch):
        with step:
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            step.apply(optimizer, clip_norm=1.0 if fused else None)
        yield


def each(turns: Iterator[None], count: Callable[[Iterator[None]], int]) -> float:
    """Return the lower quartile of a count over steps: some measure, write a line, or vote on a changed forecast."""
    for _ in range(WARM_UP_STEPS):
        next(turns)
    return statistics.quantiles([count(turns) for _ in range(STEPS)], n=4)[0]


def calls(turns: Iterator[None]) -> int:
    found = 0

    def look(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(look)
    next(turns)
    sys.setprofile(None)
    return found


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def reads(turns: Iterator[None]) -> int:
    with Operations() as operations:
        next(turns)
    return int(operations.count["aten::_local_scalar_dense"])


def test_a_step_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a plain loop over the same model with the same kernels, with all telemetry counted in each step."""
    monkeypatch.setattr(observer, "FLUSH_S", 0.0)
    found = each(ours(), calls) - each(plain(), calls)
    assert 0 < found <= MOST_CALLS, found


def test_a_step_behind_a_gate_reads_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else that the host has to know comes with the gate: the norm, and whether it is finite."""
    monkeypatch.setattr(gates, "runs_behind", lambda _flats: True)
    assert each(ours(fused=True), reads) == 1
