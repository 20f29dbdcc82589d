"""A training in the test's own process whose steps the next vote confirms, with a gate on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.data.order import permutation
from heterotrain.errors import PeerLost
from heterotrain.exchange import gate as gates
from heterotrain.exchange.gate import Gate
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.membership.fixed import Fixed
from heterotrain.network.control import Agreed, StepDecision
from heterotrain.steps import agreement, observer
from heterotrain.steps.step import Step
from heterotrain.steps.step_records import StepRecords

SAMPLES, BATCH, RATE = 40, 8, 0.05
X = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) ** 2)


class Net(torch.nn.Module):
    """A model with statistics of the batch, and a buffer of its own."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.mul_(0.5).add_(x.mean().detach())
        y: torch.Tensor = self.last(self.norm(self.first(x)).relu()) + self.count
        return y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, fused=True)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def batches(epochs: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the number and samples of each step."""
    for epoch in range(epochs):
        order = torch.as_tensor(permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True))
        for number, chosen in enumerate(order.split(BATCH)):
            yield epoch * (SAMPLES // BATCH) + number, DATA.tensors[0][chosen], DATA.tensors[1][chosen]


def plain(*, epochs: int = 1, steps: int = SAMPLES, skipped: int = -1) -> dict[str, torch.Tensor]:
    """Return what plain PyTorch makes of the same samples, where step ``skipped`` leaves no trace but its rate's."""
    model = Net()
    optimizer = sgd(model.parameters())
    schedule = decay(optimizer)
    for number, x, y in islice(batches(epochs), steps):
        if number != skipped:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


class Trained:
    """A job with a gate, and the order in which its steps are computed, voted on, applied and committed."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, measured: tuple[int, ...] = (), decays: bool = True, **settings: Any
    ) -> None:
        patch.setattr(gates, "runs_behind", lambda _flats: True)
        patch.setattr(observer, "is_measured", lambda number, _every: number in measured)
        self.order: list[str] = []
        self.agreed: dict[int, dict[Any, Any]] = {}
        """What the ranks agree on in some steps."""
        committed, exchange, order = StepRecords.committed, agreement.exchange_votes, self.order

        def committing(self: StepRecords, step: Any, *arguments: Any) -> None:
            order.append(f"commit {step.number}")
            committed(self, step, *arguments)

        def voting(ballot: Any, about: Any, **own: Any) -> Any:
            number = about.step.number
            order.append(f"vote {number}" if own["ok"] else f"against {number}")
            decision, held = exchange(ballot, about, **own)
            changed = Agreed({**decision.agreed, **self.agreed.get(number, {})})
            values = (decision.committed, decision.weights, decision.weight, decision.loss, decision.non_finite)
            return StepDecision(*values, changed, decision.apart), held

        patch.setattr(StepRecords, "committed", committing)
        patch.setattr(agreement, "exchange_votes", voting)
        self.job = heterotrain.init(**({"epochs": 1, "batch_samples": BATCH} | settings))
        self.model: Any = self.job.wrap(Net())
        self.optimizers = [self.job.optimizer(sgd(self.model.parameters()))]
        if decays:
            self.job.scheduler(decay(self.optimizers[0]))
        self.results: list[heterotrain.StepResult] = []

    def run(
        self,
        *,
        confirm: str = "late",
        before: Callable[[Step], None] = lambda _step: None,
        inside: Callable[[Step], None] = lambda _step: None,
        after: Callable[[Step, heterotrain.StepResult], object] = lambda _step, _result: None,
        spoil: int = -1,
        more: int = -1,
        data: Any = DATA,
        **limits: float,
    ) -> dict[str, torch.Tensor]:
        """Train; the script does something ``before`` and ``inside`` the micro-batch, and ``after`` the update.

        The gradient of step ``spoil`` is not finite, and step ``more`` has two passes. Return the state.
        """
        for step in self.job.steps(data, confirm=confirm):
            before(step)
            with step:
                for again in (True, False) if step.number == more else (False,):
                    for x, y in step.micro_batches(more=again):
                        output = self.model(x)
                        self.order.append(f"forward {step.number}")
                        inside(step)
                        if step.number == spoil:
                            output.register_hook(lambda gradient: gradient * float("inf"))
                        step.backward(((output - y) ** 2).mean())
                result = step.apply(*self.optimizers, **limits)
                self.order.append(f"applied {step.number}")
                self.results.append(result)
                after(step, result)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def kinds(self) -> str:
        """Return a letter for each committed step: in ``apply`` (N), before the next forward pass (E), or later (L)."""
        found = ""
        for number in range(self.job._training.progress.steps):
            at = self.order.index(f"commit {number}")
            applied, following = self.order.index(f"applied {number}"), f"forward {number + 1}"
            forward = self.order.index(following) if following in self.order else len(self.order)
            found += "N" if at < applied else "E" if at < forward else "L"
        return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless two states are the same to a relative 1e-10."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Closing:
    """Closes the gate of one step, as the flag does, and lets the next step lose a peer in some place."""

    def __init__(self, patch: pytest.MonkeyPatch, trained: Trained, number: int, *, closes: bool) -> None:
        self.trained, self.number = trained, number
        self.closes = closes
        begin, closing, form = Gate.__init__, self, Fixed.form
        patch.setattr(Fixed, "form", lambda membership, _previous: form(membership, None))

        def init(gate: Gate, flats: Any, flag: Any) -> None:
            begin(gate, flats, flag)
            votes = [order for order in closing.trained.order if order.startswith("vote")]
            if closing.closes and votes[-1] == f"vote {number}":
                closing.closes = False
                gate.closed.fill_(1.0)
                gate._copy = HostCopy(torch.tensor([1.0, float(gate.squared)], dtype=torch.float64))

        patch.setattr(Gate, "__init__", init)
        self.left = [PeerLost("gone")]

    def lose(self, step: Step, *_arguments: Any) -> None:
        if step.number == self.number + 1 and self.left:
            raise self.left.pop()
