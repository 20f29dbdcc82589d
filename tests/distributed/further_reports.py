"""More reports, in the form of ``report_scripts``: what is evaluated, kept between batches, or done to weights."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import heterotrain
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit
from distributed.report_scripts import BATCH, SAMPLES, Batch, Report
from distributed.scripts import net, optimizer_of, problem
from heterotrain.data.order import permutation
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset


class Surgery(Report):
    """Row 17: two tasks, whose conflicting gradients are projected onto each other's normal planes."""

    def losses(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        x, y = batch
        output = model(x)
        return F.mse_loss(output, y), (output + y).abs().mean()

    def run(self, step: heterotrain.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found = []
        for task in range(2):
            for batch in step.micro_batches(more=task == 0):
                step.backward(self.losses(model, batch)[task])
            found.append([p.grad.clone() for p in model.parameters()])
        self.project(model, found)
        step.apply(optimizer)

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        parameters = list(model.parameters())
        self.project(
            model, [torch.autograd.grad(each, parameters, retain_graph=True) for each in self.losses(model, batch)]
        )
        optimizer.step()

    @staticmethod
    def project(model: nn.Module, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        a, b = (nn.utils.parameters_to_vector(each) for each in gradients)
        if (dot := a @ b) < 0:
            a, b = a - dot / (b @ b) * b, b - dot / (a @ a) * a
        for p, part in zip(model.parameters(), (a + b).split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view_as(p).clone()


class ScheduleFree(torch.optim.Optimizer):
    """SGD with an average in place of a schedule: parameters are points for training, and averages after ``eval``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "k": 0, "trains": True})

    @torch.no_grad()
    def turn(self, trains: bool) -> None:  # as train and eval
        for group in self.param_groups:
            if group["trains"] != trains:
                group["trains"] = trains
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a closure is not used
        del closure
        for group in self.param_groups:
            assert group["trains"]
            c = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (0.9 * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class ScheduleFreeOptimizer(Report):
    """Row 26: an optimizer with a mode of its own, turned for evaluations in a hook."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters())

    def evaluate(self, _job: Any, model: nn.Module, optimizer: Any) -> dict[str, float]:
        optimizer.turn(trains=False)
        found = float(F.mse_loss(model(problem(SAMPLES).tensors[0]), problem(SAMPLES).tensors[1]))
        optimizer.turn(trains=True)
        return {"error": found}


class Windows(torch.utils.data.Dataset[Any]):
    """Sample ``t * BATCH + stream`` is window t of a stream, with its next values and the stream's number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        window = torch.randn(5, 3, generator=draw, dtype=torch.float64)
        return window, window.sum(1, keepdim=True), index % BATCH


class Recurrent(nn.Module):
    """A recurrent network that keeps the hidden state of each stream in a row of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)
        self.double().register_buffer("hidden", torch.zeros(BATCH, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        output, hidden = self.rnn(x, self.hidden[stream].unsqueeze(0).clone())
        self.hidden[stream] = hidden[0].detach()
        found: torch.Tensor = self.head(output)
        return found


class HiddenStates(Report):
    """Row 35: hidden states from batch to batch (truncated backpropagation through time)."""

    shuffle = False

    def data(self) -> Any:
        return Windows()

    def model(self) -> nn.Module:
        return Recurrent()

    def wrapped(self, job: Any) -> None:
        job.buffers("hidden", "sum")

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y, stream = batch
        return F.mse_loss(model(x, stream), y)


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated, as every rank has it."""

    def __iter__(self) -> Iterator[Any]:
        yield from problem(SAMPLES)


class Evaluated(Report):
    """Row 39: an evaluation of a data set, of a stream, and of DataLoaders of both."""

    def evaluate(self, job: Any, model: nn.Module, _optimizer: torch.optim.Optimizer) -> dict[str, float]:
        if job is None:
            error = float(F.mse_loss(model(problem(SAMPLES).tensors[0]), problem(SAMPLES).tensors[1]))
            return {f"{kind}-{number}": each for kind in range(4) for number, each in enumerate((error, SAMPLES))}
        found = {}
        sampler = DistributedSampler(problem(SAMPLES), num_replicas=3, rank=1)
        loader = DataLoader(problem(SAMPLES), 7, sampler=sampler, num_workers=2)
        for kind, data in enumerate((problem(SAMPLES), Stream(), loader, DataLoader(Stream(), 5))):
            measured = job.evaluate(data, lambda output, y: {"error": F.mse_loss(output, y)}, batch_samples=None)
            parts = sum(len(x) for x, _ in job.part(data))
            found |= {f"{kind}-0": measured["error"], f"{kind}-1": job.sum(samples=parts)["samples"]}
        return found


class Counter(torch.optim.SGD):
    """An optimizer that counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step(closure)


class CountsInAnAttribute(Report):
    """Row 30: what an optimizer keeps outside of its state does not come to a rank that joins."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Counter(model.parameters())


class Array(torch.utils.data.Dataset[Any]):
    """Row 2: samples in one large array."""

    BYTES = 200 << 20

    def __init__(self) -> None:
        self.rows = np.zeros((SAMPLES, self.BYTES // SAMPLES // 8))
        self.rows[:, :6] = problem(SAMPLES).tensors[0]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.from_numpy(self.rows[index, :6].copy())
        return x, x.square().sum().reshape(1)


class LargeArray(Report):
    """Row 2: loader processes share the array."""

    def data(self) -> Any:
        return Array()

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        del model, optimizer
        if number == SAMPLES // BATCH and self.folder:
            for process in Path("/proc").glob("[0-9]*"):
                if int(process.name) != os.getpid() and is_descendant(int(process.name)):
                    own = (process / "smaps_rollup").read_text().split("Private_Dirty:")[1].split()[0]
                    Path(self.folder, f"own-{process.name}").write_text(own)


def is_descendant(process: int) -> bool:
    """Return whether a process descends from this one."""
    while process > 1 and process != os.getpid():
        status = Path(f"/proc/{process}/status")
        process = int(status.read_text().split("PPid:")[1].split()[0]) if status.exists() else 0
    return process == os.getpid()


def apart(*, out: str, kind: str) -> None:
    """Row 40: train on a single sample, for two folds one after the other, or in a thread; write the weights."""
    rank = os.environ.get("RANK", "alone")

    def train(data: Any, name: str) -> None:
        job = heterotrain.init(epochs=2, batch_samples=BATCH)
        model = job.wrap(net())
        optimizer = job.optimizer(optimizer_of(model))
        for step in job.steps(data):
            with step:
                for x, y in step.micro_batches():
                    step.backward(F.mse_loss(model(x), y))
                step.apply(optimizer)
        torch.save(model.state_dict(), f"{out}/{name}-{rank}.pt")

    for name, data in sets_of(kind).items():
        if kind == "thread":
            (thread := threading.Thread(target=train, args=(data, name))).start()
            thread.join()
        else:
            train(data, name)


def sets_of(kind: str) -> dict[str, Any]:
    """Return the data of each training."""
    if kind == "one":
        return {"one": problem(1)}
    if kind == "thread":
        return {"thread": problem(SAMPLES)}
    return {f"fold {fold}": Subset(problem(SAMPLES), range(fold, SAMPLES, 2)) for fold in range(2)}


def plain_apart(data: Any) -> dict[str, torch.Tensor]:
    """Return the weights of one of these trainings in plain PyTorch."""
    model = net()
    optimizer = optimizer_of(model)
    for epoch in range(2):
        order = permutation(seed=0, epoch=epoch, epoch_samples=len(data), shuffle=True).tolist()
        for start in range(0, len(data), BATCH):
            x, y = torch.utils.data.default_collate([data[i] for i in order[start : start + BATCH]])
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict())


def download_once(*, out: str) -> None:
    """Row 37: run the recipe of the documents, and train."""
    page = (Path(__file__).parents[2] / "docs/training-loop.md").read_text()
    recipe = page.split("## Download once")[1].split("```python\n")[1].split("```")[0].replace("/data", out)

    def download(folder: str) -> None:
        with Path(folder, "downloads").open("a") as file:
            file.write("one\n")

    names = {"download": download}
    exec("import fcntl, os\n" + recipe, names)  # noqa: S102  # of this repository
    apart(out=out, kind="one")


# -- what no report names, and scripts do -----------------------------------------------------------------------------


class Standardized(nn.Module):
    """Rows of a weight with mean 0 and deviation 1."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-3)


class Parametrized(Report):
    """A parametrization of the script, with its cache, and a penalty on its result."""

    def model(self) -> nn.Module:
        model = net()
        parametrize.register_parametrization(model[0], "weight", Standardized())
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with parametrize.cached():
            return super().loss(model, batch) + 0.1 * model[0].weight.square().mean()  # type: ignore[index]  # a sequence


class LoadsLate(Report):
    """Weights of an earlier run that are loaded after the first step."""

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        del optimizer
        if number == 0:
            torch.manual_seed(5)
            model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


class RangeTest(Report):
    """A test of learning rates, after which weights and optimizer go back to their beginning."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        self.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return optimizer

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * 2.0**number if number < 4 else 0.01
        if number == 3:
            model.load_state_dict(self.saved[0])
            optimizer.load_state_dict(copy.deepcopy(self.saved[1]))


class Adafactor(Report):
    """State in other shapes than the parameters'."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.02)


class Inner(Report):
    """An inner step on copies of the weights, through which the outer gradient flows (MAML)."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        weights, losses = dict(model.named_parameters()), []
        for x, y in zip(*batch, strict=True):
            first = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
            slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
            moved = {name: w - 0.01 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            losses.append(first + F.mse_loss(torch.func.functional_call(model, moved, (x,)), y))
        return torch.stack(losses).mean()


class Compiled(Report):
    """A compiled block, and a reentrant checkpoint."""

    def model(self) -> nn.Module:
        model = net()
        model[0].compile(backend="eager")
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = batch
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)  # type: ignore[index]  # a sequence
        return F.mse_loss(model[2:](hidden), y)  # type: ignore[index]  # a sequence


class Copied(Report):
    """A copy of the wrapped model with BatchNorm, which each rank trains and evaluates by itself."""

    is_cut = False

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        del optimizer
        if number == 2:
            other = copy.deepcopy(model)
            other(problem(SAMPLES).tensors[0])
            other.eval()(problem(SAMPLES).tensors[0])
