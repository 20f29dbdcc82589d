"""An update that is queued before the host waits: the transaction of a step, with a gate on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.errors import NonFinite, PeerLost
from heterotrain.exchange import gate as gates
from heterotrain.exchange.gate import Gate, PassedGate
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.steps.finite_gradient import read_gate
from support.one_process import DATA, squared_error

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "not fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=False),
}


class Trained:
    """A job whose sums are behind a gate, and the order in which gates are read and optimizers take their steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, *, behind: bool = True, **settings: Any) -> None:
        monkeypatch.setattr(gates, "runs_behind", lambda _flats: behind)
        self.order: list[str] = []
        read = Gate.read

        def reading(gate: Gate) -> PassedGate:
            self.order.append("read")
            return read(gate)

        monkeypatch.setattr(Gate, "read", reading)
        self.job = heterotrain.init(**({"epochs": 2, "batch_samples": 8} | settings))
        torch.manual_seed(1)
        self.model = self.job.wrap(torch.nn.Linear(2, 1).double())
        self.optimizer = self.job.optimizer(KINDS[kind](self.model.parameters()))
        self.results: list[heterotrain.StepResult] = []
        self.norms: list[float] = []

    def run(self, spoil: int = -1, **limits: float) -> list[torch.Tensor]:
        """Train; the gradient of step ``spoil`` is not finite. Return weights, moments and counts."""
        step_of: Any = type(self.optimizer).step

        def stepping(*arguments: Any) -> Any:
            self.order.append("step")
            return step_of(self.optimizer, *arguments)

        optimizer: Any = self.optimizer
        optimizer.step = stepping  # as torch's schedulers do
        for step in self.job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    output = self.model(x)
                    if step.number == spoil:
                        output.register_hook(lambda gradient: gradient * float("inf"))
                    step.backward(((output - y) ** 2).mean())
                self.results.append(step.apply(self.optimizer, **limits))
                self.norms.append(self.results[-1].gradient_norm)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*self.model.parameters(), *states)]


@pytest.mark.parametrize("limits", [{}, {"clip_norm": 0.5}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizers_step_is_called_before_the_wait(
    monkeypatch: pytest.MonkeyPatch, kind: str, limits: dict[str, Any]
) -> None:
    """But not in its first step, and not by optimizers without fused kernels; the training is the same."""
    trained = Trained(monkeypatch, kind)
    found = trained.run(**limits)
    late = ["read", "step"] if kind == "not fused" else ["step", "read"]
    assert trained.order == ["read", "step", *5 * late]
    plain = Trained(monkeypatch, kind, behind=False)
    for one, other in zip(found, plain.run(**limits), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)
    assert plain.order == 6 * ["step"]
    assert trained.norms == pytest.approx(plain.norms, rel=1e-12)
    for result, other_result in zip(trained.results, plain.results, strict=True):
        assert result.learning_rates == other_result.learning_rates
        assert result.loss == pytest.approx(other_result.loss, rel=1e-12)


def test_a_limit_for_elements_reads_the_gate_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes a gradient that is not finite, which the host could not tell any more."""
    trained = Trained(monkeypatch, "AdamW")
    trained.run(clip_value=0.1)
    assert trained.order == 6 * ["read", "step"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_weights_moments_and_counts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What was queued behind the gate has not happened, and the result says so."""
    trained = Trained(monkeypatch, kind, on_non_finite="skip")
    steps = trained.run(spoil=3, clip_norm=0.5)
    assert [result.skipped for result in trained.results] == [False] * 3 + [True] + [False] * 2
    assert "the gradient of weight is not" in trained.results[3].skip_reason
    plain = Trained(monkeypatch, kind, behind=False, on_non_finite="skip")
    for one, other in zip(steps, plain.run(spoil=3, clip_norm=0.5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


def test_an_error_names_the_parameter_and_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the host has looked before the update."""
    trained = Trained(monkeypatch, "SGD")
    with pytest.raises(NonFinite, match=r"step 3 is finite, but the gradient of weight is not"):
        trained.run(spoil=3)
    assert all(bool(value.isfinite().all()) for value in trained.model.parameters())
    assert len(trained.results) == 3


def test_ignored_is_applied_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate keeps it back, and the job wants it."""
    trained = Trained(monkeypatch, "SGD", on_non_finite="ignore")
    with pytest.raises(NonFinite, match="the training is complete"):
        trained.run(spoil=3)
    assert trained.order[6:9] == ["step", "read", "step"]
    assert not any(result.skipped for result in trained.results)


def test_a_finite_gradient_with_an_infinite_norm_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The square of an element overflows, which closes the gate; the host tells that from an infinity."""
    trained = Trained(monkeypatch, "SGD", epochs=1)
    kept = []
    for step in trained.job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(trained.model, x, y) * (1e200 if step.number == 2 else 1.0))
            weight: Any = trained.model.weight
            before = weight.clone()
            kept.append(step.apply(trained.optimizer).skipped or torch.equal(before, weight))
    assert kept == [False] * 3


def test_the_script_may_change_gradients_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its changes are clipped and counted in the norm; a gradient that it replaces is, too."""
    found = []
    for behind in (True, False):
        trained = Trained(monkeypatch, "SGD", behind=behind)
        norms = []
        for step in trained.job.steps(DATA):
            with step:
                for x, y in step.micro_batches():
                    step.backward(squared_error(trained.model, x, y))
                for parameter in trained.model.parameters():
                    assert parameter.grad is not None
                    if step.number % 2:
                        parameter.grad.mul_(3.0)
                    else:
                        parameter.grad = parameter.grad * 2.0
                result = step.apply(trained.optimizer, clip_norm=0.5 if step.number > 2 else None)
            norms.append(result.gradient_norm if step.number != 0 else 0.0)
        found.append((norms, [value.detach().clone() for value in trained.model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("cut_at", ["before", "behind", "never"])
def test_a_closed_gate_of_a_broken_formation_is_the_loss_of_a_peer(cut_at: str) -> None:
    """What the flag has closed is no verdict on the gradient. A cut behind an open gate leaves the update as it is."""
    group = Group(rank=0, world_size=2, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    if cut_at == "before":
        group.cut("a peer is lost")
    gate = Gate([torch.ones(2)], group.flag)
    if cut_at == "behind":
        group.cut("a peer is lost")
    waits = []
    read = gate.read

    def reading() -> PassedGate:
        waits.append(group.waiting.what if group.waiting else "")
        return read()

    gate.read = reading  # type: ignore[method-assign]  # to see the name of the wait
    if cut_at == "before":
        with pytest.raises(PeerLost, match="a peer is lost"):
            read_gate(gate, group)
    else:
        assert read_gate(gate, group).was_open
    assert waits == ["the accelerator, and the reductions queued on it"]
