"""Scripts after public reports about DistributedDataParallel, each beside the same training in plain PyTorch.

A report is a class of small parts: model, data, optimizer, schedule, loss. The job and its plain twin use the same
parts, so nothing is written twice.
"""

from __future__ import annotations

import io
import os
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import heterotrain
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit
from distributed.fault_injectors import FaultInjector
from distributed.scripts import net, problem
from heterotrain.data.order import permutation
from torch import nn
from torch.utils.data import TensorDataset, default_collate

SAMPLES, BATCH, EPOCHS = 96, 16, 2
Batch = Any


class Report:
    """The parts of one script; by default a small network in fp64 with AdamW."""

    batch_samples = BATCH
    shuffle = True
    is_cut = True
    folder = ""
    collate: Callable[[list[Any]], Batch] | None = None

    def model(self) -> nn.Module:
        return net()

    def data(self) -> Any:
        return problem(SAMPLES)

    def indices(self, epoch: int) -> Sequence[int]:
        order: list[int] = permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=self.shuffle).tolist()
        return order

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def schedule(self, _optimizer: torch.optim.Optimizer) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    def prepare(self, _job: Any) -> None:
        """Do what the script does right after ``heterotrain.init``."""

    def wrapped(self, _job: Any) -> None:
        """Do what it does right after ``job.wrap``."""

    def run(self, step: heterotrain.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in step.micro_batches():
            step.backward(self.loss(model, batch))
        step.apply(optimizer)

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        optimizer.zero_grad()
        self.loss(model, batch).backward()
        optimizer.step()

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Do what the script does after each step."""

    def evaluate(self, _job: Any, _model: nn.Module, _optimizer: torch.optim.Optimizer) -> dict[str, float]:
        return {}


class Encoding(UserDict[str, torch.Tensor]):
    """As a tokenizer's result: keys as attributes, and a method ``to``."""

    def __getattr__(self, name: str) -> torch.Tensor:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Encodings(Report):
    """Row 14: batches that keep their type."""

    @staticmethod
    def collate(samples: list[Any]) -> Encoding:  # type: ignore[override]  # a function in place of a value
        x, y = default_collate(samples)
        return Encoding(x=x, y=y)

    def loss(self, model: nn.Module, batch: Encoding) -> torch.Tensor:
        moved = batch.to(torch.device("cpu"))
        return F.mse_loss(model(moved.x), moved.y)


@dataclass
class Pair:
    """A batch as a dataclass."""

    x: nn.utils.rnn.PackedSequence
    y: torch.Tensor


class Packed(Report):
    """Row 15: packed sequences inside a dataclass."""

    @staticmethod
    def collate(samples: list[Any]) -> Pair:  # type: ignore[override]  # a function in place of a value
        x, y = default_collate(samples)
        lengths = 2 + (x[:, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
        return Pair(packed, y)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.GRU(1, 1).double()

    def loss(self, model: nn.Module, batch: Pair) -> torch.Tensor:
        return F.mse_loss(model(batch.x)[1][0], batch.y)


class Drawn:
    """A data set that draws its samples with replacement, by weight."""

    def __init__(self) -> None:
        self.weights = torch.linspace(0.1, 3.0, SAMPLES, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def draw(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(100 + epoch)
        drawn: list[int] = torch.multinomial(self.weights, SAMPLES, replacement=True, generator=generator).tolist()
        return drawn

    def read(self, epoch: int, start: int, stop: int) -> list[Any]:
        return [problem(SAMPLES)[i] for i in self.draw(epoch)[start:stop]]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(problem(SAMPLES).tensors)


class Weighted(Report):
    """Row 34: a weighted sampler."""

    def data(self) -> Any:
        return Drawn()

    def indices(self, epoch: int) -> Sequence[int]:
        return Drawn().draw(epoch)


class Odd(nn.Module):
    """A model with unusual contents."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.a, self.b = kind, nn.Linear(6, 8).double(), nn.Linear(8, 1).double()
        if kind == "complex":
            self.register_buffer("table", torch.polar(torch.ones(6), torch.arange(6.0)))
        if kind == "int8":
            self.table = nn.Parameter(torch.arange(-3, 3, dtype=torch.int8), requires_grad=False)
        if kind == "scalar":
            self.table = nn.Parameter(torch.tensor(1.0).double())
        if kind == "uint16":
            self.register_buffer("table", torch.arange(6, dtype=torch.int32).to(torch.uint16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("complex", "int8", "scalar"):
            x = x * (self.table.real if self.kind == "complex" else self.table).double()
        found: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return found


class Contents(Report):
    """Rows 21 and 22: formats of buffers and parameters."""

    kind = "complex"

    def model(self) -> nn.Module:
        return Odd(self.kind)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)


class FrozenInt8(Contents):
    """Row 22."""

    kind = "int8"


class Scalar(Contents):
    """Row 22."""

    kind = "scalar"


class Uint16(Contents):
    """Row 22."""

    kind = "uint16"


class ExtraModel(nn.Sequential):
    """A model whose extra state is a stream of bytes, as that of quantized layers."""

    def get_extra_state(self) -> Any:
        return io.BytesIO(b"of a library")

    def set_extra_state(self, state: Any) -> None:
        assert state.getvalue() == b"of a library"


class ExtraState(Report):
    """Row 24: a library's extra state in a BytesIO."""

    def model(self) -> nn.Module:
        return ExtraModel(*net())


class Numpy:
    """A schedule that keeps its numbers as numpy computes them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.n, self.history = optimizer, np.int64(0), np.zeros(3)

    def step(self) -> None:
        self.n += np.int64(1)
        self.history[self.n % 3] = self.n
        for group in self.optimizer.param_groups:
            group["lr"] = float(np.float32(0.05) / np.sqrt(np.float32(self.n + 1)) + 1e-4 * self.history.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "history": self.history, "best": np.float32(1.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["history"], np.ndarray)
        self.n, self.history = np.int64(state["n"]), state["history"]


class NumpySchedule(Report):
    """Row 27: numpy's numbers and arrays in a state."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return Numpy(optimizer)


class OneCycle(Report):
    """Row 28: a scheduler of PyTorch."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=13)


class EightBits(torch.optim.Optimizer):
    """An optimizer with state in 8 bits, in a list and in a dictionary."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a closure is not used
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"q": torch.zeros(parameter.numel(), dtype=torch.uint8), "s": [torch.ones(1).double()]}
                mean = (state["q"].double() - 128) / 127 * state["s"][0] if int(state["q"].sum()) else 0.0
                mean = 0.9 * mean + 0.1 * parameter.grad.flatten()
                state["s"][0] = mean.abs().max().reshape(1)
                state["q"] = (mean / state["s"][0] * 127 + 128).round().to(torch.uint8)
                parameter.add_(mean.view_as(parameter), alpha=-group["lr"])


class QuantizedOptimizer(Report):
    """Rows 29 and 30: state in lists, and in uint8, whose format torch changes when it restores."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return EightBits(model.parameters())


class Tower(nn.Module):
    """A model whose state leaves its frozen part out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.encoder, self.head = nn.Linear(6, 6).double().requires_grad_(requires_grad=False), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.encoder(x)))
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "encoder" not in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT002  # torch's own
        del strict
        return super().load_state_dict(state, strict=False, assign=assign)


class FrozenTower(Contents):
    """Row 41."""

    def model(self) -> nn.Module:
        return Tower()


class Texts:
    """A data set that keeps each sample as a tensor of its own."""

    def __init__(self) -> None:
        x, y = problem(SAMPLES).tensors
        self.samples = [(a.clone(), b.clone()) for a, b in zip(x, y, strict=True)] * 4

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(problem(SAMPLES).tensors)


class ListOfTensors(Report):
    """Row 1: 768 tensors, and two loader processes."""

    def data(self) -> Any:
        return Texts()


# -- scripts that get one sentence ------------------------------------------------------------------------------------


class SparseLayer(Report):
    """Row 20."""

    def model(self) -> nn.Module:
        return nn.Embedding(4, 4, sparse=True)


class SparseFunction(Report):
    """Row 20: a sparse gradient of a function."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1).double()

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        return F.embedding(torch.zeros(len(batch[0]), dtype=torch.long), model.weight, sparse=True).mean()


class MaxNorm(Report):
    """A layer that changes its weights in forward passes."""

    def model(self) -> nn.Module:
        return nn.Embedding(4, 4, max_norm=1.0)


class SparseBuffer(Report):
    """Row 23."""

    def model(self) -> nn.Module:
        model = net()
        model.register_buffer("adjacency", torch.eye(6).to_sparse())
        return model


class ComplexParameter(Report):
    """Row 19."""

    def model(self) -> nn.Module:
        model = net()
        model.register_parameter("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
        return model


class InBackward(Report):
    """Row 32: optimizers that step in the backward pass."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        return optimizer


class Poison:
    """A data set with one bad sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == 40:  # any one
            raise OSError("cannot identify image file 'img.jpg'")
        return problem(SAMPLES)[index]


class BadSample(Report):
    """Row 38."""

    def data(self) -> Any:
        return Poison()


class DefaultDevice(Report):
    """Row 36; the meta device stands for a GPU."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        torch.set_default_device("meta")
        return super().optimizer(model)


class Barrier(Report):
    """Row 37: one rank prepares, and the others wait."""

    def prepare(self, _job: Any) -> None:
        torch.distributed.barrier()


class OtherSettings(Report):
    """Ranks with different arguments of ``heterotrain.init``."""

    @property
    def batch_samples(self) -> int:  # type: ignore[override]  # another one on each rank
        return BATCH + int(os.environ["RANK"])


class OneFails(Report):
    """An error of the script on one rank."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            raise ValueError("a mistake of the script")
        return super().loss(model, batch)


def tensors_of(model: nn.Module, found: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers in fp64, and what was measured."""
    every = [*model.named_parameters(), *model.named_buffers()]
    tensors = {name: torch.view_as_real(v).double() if v.is_complex() else v.detach().double() for name, v in every}
    return tensors | {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def report_of(name: str) -> Report:
    """Return a report."""
    from distributed import further_reports  # noqa: PLC0415  # it imports this module

    made: Report = (getattr(further_reports, name, None) or globals()[name])()
    return made


def plain(name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a report's training in plain PyTorch."""
    report = report_of(name)
    model = report.model()
    optimizer = report.optimizer(model)
    schedule = report.schedule(optimizer)
    data, number, found = report.data(), 0, dict[str, float]()
    data = TensorDataset(*data.tensors) if hasattr(data, "tensors") else data
    for epoch in range(EPOCHS):
        order = report.indices(epoch)
        for start in range(0, SAMPLES, BATCH):
            samples = [data[i] for i in order[start : start + BATCH]]
            report.plain(model, optimizer, (report.collate or default_collate)(samples))
            if schedule is not None:
                schedule.step()
            report.after(model, optimizer, number)
            number += 1
        model.eval()
        with torch.no_grad():
            found = report.evaluate(None, model, optimizer)
        model.train()
    return tensors_of(model, found)


def train(*, out: str, report: str, workers: int = 0, fault: dict[str, Any] | None = None) -> None:
    """Train a report's script and write the weights; ``fault`` as in ``fault_injectors.FaultInjector``."""
    injector, parts, found = FaultInjector(fault), report_of(report), dict[str, float]()
    parts.folder = out
    job = heterotrain.init(epochs=EPOCHS, batch_samples=parts.batch_samples)
    parts.prepare(job)
    model = job.wrap(parts.model())
    parts.wrapped(job)
    optimizer = job.optimizer(parts.optimizer(model))
    schedule = parts.schedule(optimizer)
    if schedule is not None:
        job.scheduler(schedule)

    @job.on_epoch_end
    def measure(_epoch: int) -> None:
        found.update(parts.evaluate(job, model, optimizer))

    for step in job.steps(parts.data(), collate=parts.collate, workers=workers, shuffle=parts.shuffle):
        with step:
            injector.at("step", step.number)
            parts.run(step, model, optimizer)
            parts.after(model, optimizer, step.number)
    torch.save(tensors_of(model, found), f"{out}/{os.environ.get('HETEROTRAIN_WORKER', 'alone')}.pt")
