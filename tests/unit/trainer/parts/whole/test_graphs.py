"""Recorded passes of a whole model, with a recorder that runs the operations again and copies into the same memory."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import heterotrain
import numpy as np
import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.parts.whole import graphs
from heterotrain.parts.whole.graphs import Forms, GraphedForward
from heterotrain.parts.whole.recording import Recorder, Replay, Run
from torch import nn


class Again(Recorder):
    """Runs operations again; their results go to the memory of the first ones, as in a CUDA graph.

    Attributes:
        replays: forward and backward passes that were run again.
        error: raised by the next recording.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.error: Exception | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block."""
        yield

    def record(self, *runs: Run) -> list[tuple[list[Any], Replay]]:
        """Run each function once."""
        error, self.error = self.error, None
        if error is not None:
            raise error
        return [self._recorded(run) for run in runs]

    def _recorded(self, run: Run) -> tuple[list[Any], Replay]:
        first = run()

        def again() -> None:
            self.replays += 1
            with torch.no_grad():
                for place, value in zip(first, run(), strict=True):
                    if place is not None:
                        place.copy_(value.detach())

        return first, again


class Net(nn.Module):
    """Layers with running statistics and random numbers; one parameter is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh())
        self.head, self.unused = nn.Linear(8, 1), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        """Return values a row, and a name."""
        return {"y": self.head(self.body(x)) * scale, "name": "net"}


def a_net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net().double()


def graphed(model: nn.Module) -> tuple[Any, Again]:
    recorder = Again()
    GraphedForward(model, recorder)
    return model, recorder


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002  # what scripts draw from


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_weights_equal_those_of_eager_passes_over_uneven_micro_batches(kind: str, own_process: None) -> None:
    """Statistics, dropout and a step's last sizes included; outputs that the script keeps stay as they were."""
    del own_process
    x = rows(46)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def trained(wrap: Callable[[nn.Module], Any]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        job = heterotrain.init(epochs=4, batch_samples=10, micro_batch_samples=4, batch_norm="local")
        model, kept = job.wrap(a_net()), []
        wrap(model)
        optimizer = job.optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.05))
        for step in job.steps(data):
            with step:
                outputs = []
                for x, y in step.micro_batches():
                    output = model(x)["y"]
                    outputs.append(output.detach())
                    step.backward(((output - y) ** 2).mean())
                step.apply(optimizer)
            kept += outputs
        return {name: value.clone() for name, value in model.state_dict().items()}, kept

    recorder = Again()
    expected, outputs = trained(lambda _model: None)
    found, kept = trained(lambda model: GraphedForward(model, recorder))
    assert recorder.replays > 60
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kept, outputs, rtol=1e-10, atol=1e-12)


def test_a_recording_leaves_no_trace() -> None:
    """Weights, statistics and all generators are those of a model that runs eagerly, call by call."""
    (model, recorder), plain = graphed(a_net()), a_net()
    for number in range(4):
        states = []
        for each in (model, plain):
            torch.manual_seed(number)
            each(rows(5, number))["y"].sum().backward()
            states.append((drawn(), {name: value.tolist() for name, value in each.state_dict().items()}))
        assert states[0] == states[1]
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert recorder.replays == 6


def test_a_form_is_recorded_the_second_time_and_only_if_there_is_room() -> None:
    """A recording that was not used for long gives its place."""
    forms: Forms[str] = Forms()
    for form in range(graphs.MOST_FORMS):
        assert forms.find(form) is None
        assert not forms.is_due(form)
        assert forms.is_due(form)
        forms.keep(form, f"{form}")
    assert forms.find(0) == "0"
    assert not forms.is_due("one more")
    assert not forms.is_due("one more")
    for _ in range(graphs.IDLE_CALLS + 1):
        forms.find(0)
    assert forms.is_due("one more")
    assert (len(forms), forms.find(1), forms.find(2)) == (graphs.MOST_FORMS - 1, None, "2")
    forms.refuse("bad")
    assert not any(forms.is_due("bad") for _ in range(3))
    for form in range(1000, 1000 + 2 * graphs.MOST_SEEN):
        forms.is_due(form)
    assert len(forms._seen) == graphs.MOST_SEEN


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.body[2].eval(),
        lambda model: model.body[0].weight.requires_grad_(False),
        lambda model: setattr(model.body[0].weight, "data", model.body[0].weight.data.clone()),
        lambda model: setattr(model, "head", nn.Linear(8, 1).double()),
        lambda model: model.body[1].register_buffer("running_mean", torch.zeros(8, dtype=torch.float64)),
    ],
    ids=["mode", "frozen", "moved", "replaced", "buffer"],
)
def test_what_a_recording_depends_on_is_part_of_its_form(change: Callable[[Any], object]) -> None:
    """The script may change the model at any time."""
    (model, recorder), plain = graphed(a_net()), a_net()
    for number in range(6):
        if number == 3:
            for each in (model, plain):
                torch.manual_seed(7)
                change(each)
        before = recorder.replays
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(number)
            each(rows(4, number))["y"].square().sum().backward()
        assert (recorder.replays > before) is (number not in (0, 3))
        assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in plain.parameters()]
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            if own.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_two_forward_passes_before_one_backward_pass() -> None:
    """The second one runs eagerly, because the first one's activations are still needed; gradients of inputs, too."""
    model, recorder = graphed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())
    plain = copy.deepcopy(model)
    kept = []
    for number in range(4):
        for each in (model, plain):
            one, other = rows(4, number).requires_grad_(), rows(4, number + 9).requires_grad_()
            each.zero_grad()
            (each(one) * each(other)).sum().backward()
            kept.append((one.grad, other.grad, each[0].weight.grad.clone()))
    assert recorder.replays == 8
    for own, expected in zip(kept[::2], kept[1::2], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)
    model(rows(4))  # a result that is dropped does not hold the recording
    before = recorder.replays
    model(rows(4))
    assert recorder.replays == before + 1


def test_a_second_backward_pass_through_one_forward_pass_is_refused() -> None:
    """Its activations may be gone, and gradients would be wrong without an error."""
    model, _ = graphed(nn.Linear(3, 1).double())
    for _ in range(2):
        model(rows(4)).sum().backward()
    loss = model(rows(4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="ran twice through one forward pass"):
        loss.backward()


def test_gradients_that_the_script_keeps_or_adds_up_are_not_overwritten() -> None:
    """Outside of steps, no bucket takes them before the next pass."""
    model, recorder = graphed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())
    found = []
    for each in (copy.deepcopy(model), model):
        for _ in range(2):
            each(rows(4)).sum().backward()
        each.zero_grad()
        kept = [torch.autograd.grad(each(rows(4, number)).sum(), list(each.parameters())) for number in range(3)]
        for number in range(3):
            each(rows(4, number)).sum().backward()
        found.append((kept, [parameter.grad for parameter in each.parameters()]))
    assert recorder.replays == 14
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_a_layer_in_two_places_keeps_its_parameters() -> None:
    """Gradients arrive where the optimizer looks for them."""
    layer = nn.Linear(3, 3)
    model, recorder = graphed(nn.Sequential(layer, nn.Tanh(), layer).double())
    plain, own = copy.deepcopy(model), list(map(id, model.parameters()))
    for number in range(4):
        for each in (model, plain):
            each.zero_grad()
            each(rows(4, number)).sum().backward()
        assert list(map(id, model.parameters())) == own
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert recorder.replays == 6


def test_passes_without_gradients_run_eagerly_and_precision_is_part_of_the_form() -> None:
    """Evaluation is never recorded."""
    model, recorder = graphed(nn.Linear(3, 1))
    with torch.no_grad():
        for _ in range(3):
            model(rows(4).float())
    assert recorder.replays == 0
    for _ in range(3):
        for half in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output = model(rows(4).float())
            assert output.dtype is (torch.bfloat16 if half else torch.float32)
            output.float().sum().backward()
    assert recorder.replays == 8


class Odd(nn.Module):
    """Does in its forward pass what it is told."""

    def __init__(self, do: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.do = nn.Linear(3, 1).double(), do
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        """Return something."""
        return self.do(self, x)


FOREIGN = nn.Parameter(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (lambda m, x: m.layer(x) * random.random(), "draws random numbers on the host"),  # noqa: S311  # no secret
        (lambda m, x: m.layer(x) * np.random.rand(), "draws random numbers on the host"),  # noqa: NPY002  # as scripts do
        (lambda m, x: m.layer(x) * FOREIGN, "gradients flow to tensors that are not its parameters"),
        (lambda m, x: (m.layer(x), object()), "other values than tensors"),
        (lambda m, x: setattr(m, "kept", [m.layer(x).mean()]) or m.layer(x), "keeps results of the pass"),
        (lambda m, x: m.layer(x).detach(), "does not depend on its parameters"),
    ],
)
def test_passes_that_do_more_than_a_recording_repeats_run_eagerly(
    do: Callable[[Any, torch.Tensor], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why; nothing that was tried leaves a trace."""
    model, recorder = graphed(Odd(do))
    plain = Odd(do)
    for _ in range(4):
        draws = []
        for each in (model, plain):
            random.seed(5)
            np.random.seed(5)  # noqa: NPY002  # as above
            each(rows(4))
            draws.append((drawn(), float(each.total)))
        assert draws[0] == draws[1]
    assert recorder.replays == 0
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_buffers_that_are_replaced_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Each new one may have another place, and so another form; one that is replaced now and then is found."""
    for every in (1, 2):
        calls = []

        def do(model: Any, x: torch.Tensor, *, every: int = every, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            if len(calls) % every == 0:
                model.total = model.total + 1
            return model.layer(x)  # type: ignore[no-any-return]  # torch leaves calls of layers untyped

        model, recorder = graphed(Odd(do))
        for _ in range(4):
            model(rows(4)).sum().backward()
        assert recorder.replays == 0
    assert "puts other tensors" in caplog.records[-1].getMessage()


def test_hooks_of_layers_and_exchanges_in_the_forward_pass_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """A hook on the model itself runs around a recording."""
    model, recorder = graphed(nn.Sequential(nn.Linear(3, 1)).double())
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        model(rows(4)).sum().backward()
    assert (len(seen), recorder.replays) == (3, 4)
    model[0].register_forward_hook(lambda *_: seen.append(2))
    for _ in range(3):
        model(rows(5)).sum().backward()
    assert (seen.count(2), recorder.replays) == (3, 4)
    script = SimpleNamespace(started=0)
    talking = Odd(lambda m, x: setattr(script, "started", script.started + 1) or m.layer(x))
    recorder = Again()
    GraphedForward(talking, recorder).group = SimpleNamespace(script=script)  # type: ignore[assignment]  # what it asks
    for _ in range(3):
        talking(rows(4)).sum().backward()
    assert (script.started, recorder.replays) == (3, 0)
    reasons = [record.getMessage() for record in caplog.records]
    assert "layer '0' has hooks" in reasons[0]
    assert "exchanges data with other ranks" in reasons[1]


def test_memory_that_does_not_suffice_and_other_errors_of_a_recording(caplog: pytest.LogCaptureFixture) -> None:
    """All recordings are dropped, and the form runs eagerly; an operation that cannot be recorded is an error."""
    model, recorder = graphed(nn.Linear(3, 1).double())
    for size in (4, 4, 5):
        model(rows(size)).sum().backward()
    forms = model.forward._forms
    assert len(forms) == 1
    recorder.error = torch.OutOfMemoryError("no memory")
    for _ in range(3):
        model(rows(5)).sum().backward()
    assert len(forms) == 0
    assert "memory does not suffice" in caplog.records[-1].getMessage()
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    model(rows(6)).sum().backward()
    with pytest.raises(UsageError, match=r"graphs=True cannot record this model.*not permitted when stream"):
        model(rows(6))
    for _ in range(2):
        model(rows(7)).sum().backward()
    assert len(forms) == 1
    model.forward.stop()
    before = recorder.replays
    model(rows(7)).sum().backward()
    assert (len(forms), recorder.replays) == (0, before)


def test_copies_of_a_model_run_without_recordings() -> None:
    """A moving average of weights is a copy, and must not run the recordings of the original's memory."""
    model, recorder = graphed(nn.Sequential(nn.Linear(3, 1)).double())
    for _ in range(2):
        model(rows(4)).sum().backward()
    before = recorder.replays
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # made in this test
        torch.testing.assert_close(other(rows(4)), model[0](rows(4)), rtol=0, atol=0)
        nn.init.zeros_(other[0].weight)
        assert float(other(rows(4)).detach().std()) == 0.0
    assert recorder.replays == before


class Bare(nn.Module):
    """Has layers and no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(2)), {}, r"layer '0'.*batch_norm='local'"),
        (lambda: torch.compile(nn.Linear(2, 2)), {}, r"compiled.*reduce-overhead"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {"compile_units": True}, r"compiled.*reduce-overhead"),
        (Bare, {}, r"has no forward\(\)"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), {"units": ""}, "leave out units="),
    ],
    ids=["batch norm", "compiled", "compiled units", "no forward", "units"],
)
def test_models_that_cannot_be_recorded_are_refused_on_every_device(
    model: Callable[[], nn.Module], options: dict[str, Any], told: str, own_process: None
) -> None:
    """So a mistake shows on a laptop, too."""
    del own_process
    job = heterotrain.init(epochs=1, batch_samples=4)
    with pytest.raises(UsageError, match=told):
        job.wrap(model(), graphs=True, **options)


@pytest.mark.parametrize("parallelism", ["sharded", "pipeline"])
def test_divided_models_are_refused(parallelism: str, own_process: None) -> None:
    """A part of a model waits for others in its passes."""
    del own_process
    job = heterotrain.init(epochs=1, batch_samples=4, parallelism=parallelism)
    with pytest.raises(UsageError, match="that each rank holds whole"):
        job.wrap(lambda: nn.Sequential(nn.Linear(2, 2)), graphs=True)


def test_a_processor_runs_as_without_graphs(caplog: pytest.LogCaptureFixture, own_process: None) -> None:
    """The same script runs on mixed devices, so this is a line in the log."""
    del own_process
    caplog.set_level(logging.INFO)
    model = heterotrain.init(epochs=1, batch_samples=4).wrap(nn.Linear(2, 2), graphs=True)
    assert "forward" not in vars(model)
    assert any("graphs=True has no effect here" in record.getMessage() for record in caplog.records)
