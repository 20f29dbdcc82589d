"""More reports, in the form of ``report_scripts``: what is evaluated, kept between batches, or done to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import heterotrain
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit
from distributed.report_scripts import BATCH, SAMPLES, Batch, Report
from distributed.scripts import problem
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Surgery(Report):
    """Row 17: two tasks, whose conflicting gradients are projected onto each other's normal planes."""

    def losses(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the mean loss of each task."""
        x, y = batch
        output = model(x)
        return F.mse_loss(output, y), (output + y).abs().mean()

    def run(self, step: heterotrain.Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make a pass for each task."""
        found = []
        for task in range(2):
            for batch in step.micro_batches(more=task == 0):
                step.backward(self.losses(model, batch)[task])
            found.append([p.grad.clone() for p in model.parameters()])
        self.project(model, found)
        step.apply(optimizer)

    def plain(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        """Do the same with the whole batch."""
        parameters = list(model.parameters())
        self.project(
            model, [torch.autograd.grad(each, parameters, retain_graph=True) for each in self.losses(model, batch)]
        )
        optimizer.step()

    @staticmethod
    def project(model: nn.Module, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give the parameters the sum of both projected gradients."""
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
        """Exchange points and averages."""
        for group in self.param_groups:
            if group["trains"] != trains:
                group["trains"] = trains
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a closure is not used
        """Take a step."""
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
        """Return it."""
        return ScheduleFree(model.parameters())

    def evaluate(self, _job: Any, model: nn.Module, optimizer: Any) -> dict[str, float]:
        """Evaluate the average."""
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
        """Go on from the streams' hidden states."""
        output, hidden = self.rnn(x, self.hidden[stream].unsqueeze(0).clone())
        self.hidden[stream] = hidden[0].detach()
        found: torch.Tensor = self.head(output)
        return found


class HiddenStates(Report):
    """Row 35: hidden states from batch to batch (truncated backpropagation through time)."""

    shuffle = False

    def data(self) -> Any:
        """Return the windows."""
        return Windows()

    def model(self) -> nn.Module:
        """Return the network."""
        return Recurrent()

    def wrapped(self, job: Any) -> None:
        """Let ranks add up what each one changes."""
        job.buffers("hidden", "sum")

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the windows."""
        x, y, stream = batch
        return F.mse_loss(model(x, stream), y)


class Stream(IterableDataset[Any]):
    """A data set that can only be iterated, as every rank has it."""

    def __iter__(self) -> Iterator[Any]:
        yield from problem(SAMPLES)


class Evaluated(Report):
    """Row 39: an evaluation of a data set, of a stream, and of DataLoaders of both."""

    def evaluate(self, job: Any, model: nn.Module, _optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Return the error of each kind, and the samples of all parts."""
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
