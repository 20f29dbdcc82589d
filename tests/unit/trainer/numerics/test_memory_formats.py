"""A model in another memory format trains to the weights of plain PyTorch, with every form of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import heterotrain
import pytest
import torch
from heterotrain.state.strides import is_dense, laid_out_like, view_like

SAMPLES, BATCH = 24, 6
FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **form: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, **form),
    "adamw": lambda parameters, **form: torch.optim.AdamW(parameters, lr=1e-2, **form),
    "adagrad": lambda parameters, **form: torch.optim.Adagrad(parameters, lr=1e-2, **form),
}


def net(memory_format: torch.memory_format, dtype: torch.dtype) -> torch.nn.Module:
    """Return convolutions with a kernel of one pixel, too: its strides mean nothing, and kernels compare them."""
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 5, 1), torch.nn.ReLU(),
        torch.nn.Conv2d(5, 6, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(6, 4),
    )  # fmt: skip
    return torch.nn.Sequential(*layers).to(dtype).to(memory_format=memory_format)


def data(dtype: torch.dtype) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return torch.utils.data.TensorDataset(x, torch.randint(4, (SAMPLES,), generator=generator))


def plain(memory_format: torch.memory_format, dtype: torch.dtype, kind: str, form: str, *, epochs: int) -> list[float]:
    """Return the weights that PyTorch alone trains."""
    model = net(memory_format, dtype)
    optimizer = KINDS[kind](model.parameters(), **FORMS[form])
    x, y = data(dtype).tensors
    for _ in range(epochs):
        for at in range(0, SAMPLES, BATCH):
            optimizer.zero_grad()
            loss_of(model, x[at : at + BATCH], y[at : at + BATCH], memory_format).backward()
            optimizer.step()
    return weights(model)


def loss_of(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, memory_format: torch.memory_format
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x.to(memory_format=memory_format)), y)


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).tolist()


def job_weights(
    memory_format: torch.memory_format, dtype: torch.dtype, kind: str, form: str, *, epochs: int, **settings: str
) -> list[float]:
    """Return the weights of a job in this process."""
    job = heterotrain.init(epochs=epochs, batch_samples=BATCH, **settings)
    model = job.wrap(net(memory_format, dtype))
    optimizer = job.optimizer(KINDS[kind](model.parameters(), **FORMS[form]))
    for step in job.steps(data(dtype), shuffle=False):
        with step:
            for x, y in step.micro_batches():
                step.backward(loss_of(model, x, y, memory_format))
            step.apply(optimizer)
    return weights(model)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_weights_are_those_of_plain_pytorch(
    memory_format: torch.memory_format, kind: str, form: str, dtype: torch.dtype
) -> None:
    expected = plain(memory_format, dtype, kind, form, epochs=1)
    found = job_weights(memory_format, dtype, kind, form, epochs=1)
    assert found == pytest.approx(expected, abs=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_optimizer_goes_on_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """The file holds the moments row by row, and the kernel reads them as the parameter lies in memory."""
    arguments = (torch.channels_last, torch.float64, kind, "fused")
    job_weights(*arguments, epochs=1, checkpoint_uri=str(tmp_path))
    found = job_weights(*arguments, epochs=2, checkpoint_uri=str(tmp_path))
    assert found == pytest.approx(plain(*arguments, epochs=2), abs=1e-10)


@pytest.mark.parametrize("place", ["before the step", "in the loop", "after the loop", "a loaded state", "gaps"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_format_that_changes_while_training_changes_no_weight(kind: str, place: str) -> None:
    """Torch's own kernels would pair the wrong elements, as moments and gradients keep the old format."""
    x, y = data(torch.float64).tensors
    job = heterotrain.init(epochs=2, batch_samples=BATCH)
    model = job.wrap(net(torch.contiguous_format, torch.float64))
    optimizer = job.optimizer(KINDS[kind](model.parameters(), fused=True))
    for step in job.steps(torch.utils.data.TensorDataset(x, y), shuffle=False):

        def change(here: str, at: int = step.number) -> None:
            if (here, at) == (place, 3):
                model.to(memory_format=torch.channels_last)

        change("before the step")
        for parameter in model.parameters() if (place, step.number) == ("gaps", 3) else ():
            parameter.data = torch.stack([parameter.data] * 2, -1)[..., 0]
        if place == "a loaded state" and step.number == 3:
            rows = optimizer.state_dict()
            model.to(memory_format=torch.channels_last)
            optimizer.load_state_dict(rows)
        with step:
            for inputs, targets in step.micro_batches():
                change("in the loop")
                step.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            change("after the loop")
            step.apply(optimizer, clip_norm=0.5)
    reference = net(torch.contiguous_format, torch.float64)
    own = KINDS[kind](reference.parameters(), foreach=False)
    for at in [*range(0, SAMPLES, BATCH)] * 2:
        own.zero_grad()
        torch.nn.functional.cross_entropy(reference(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        for parameter in reference.parameters() if norm > 0.5 else ():
            parameter.grad *= 0.5 / norm  # torch's own clipping adds 1e-6 to the norm
        own.step()
    assert weights(model) == pytest.approx(weights(reference), abs=1e-10)


@pytest.mark.parametrize("way", ["replaced", "another .data"])
def test_gradients_of_a_script_in_another_format_update_their_own_weights(way: str) -> None:
    """As those of ``torch.autograd.grad``; without clipping, which would take them into the buckets."""
    job = heterotrain.init(epochs=1, batch_samples=BATCH)
    model = job.wrap(torch.nn.Linear(4, 3).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    wanted = model.weight.detach().clone()
    for step in job.steps(torch.randn(BATCH, 4, dtype=torch.float64)):
        with step:
            for x in step.micro_batches():
                step.backward(model(x).square().mean())
            own = torch.arange(12.0, dtype=torch.float64).view(4, 3).T
            if way == "replaced":
                model.weight.grad = own
            else:
                model.weight.grad.data = own
            step.apply(optimizer)
            wanted -= own
    assert optimizer.param_groups[0]["fused"]
    torch.testing.assert_close(model.weight.detach(), wanted)


@pytest.mark.parametrize(
    ("shape", "permutation"), [((4, 3, 2, 5), (0, 2, 3, 1)), ((4, 3, 1, 1), (0, 2, 3, 1)), ((2, 3), (1, 0)), ((), ())]
)
def test_a_view_lies_in_memory_as_its_parameter_does(shape: tuple[int, ...], permutation: tuple[int, ...]) -> None:
    back = [permutation.index(at) for at in range(len(permutation))]
    parameter = torch.randn([shape[at] for at in permutation]).permute(back)
    buffer = torch.zeros(parameter.numel() + 7)
    view = view_like(buffer[7:], parameter)
    view.copy_(parameter)
    assert (view.shape, view.stride()) == (parameter.shape, parameter.stride())
    assert torch.equal(view, parameter)
    assert float(buffer[:7].abs().sum()) == 0
    assert laid_out_like(parameter.contiguous(), parameter).stride() == parameter.stride()


def test_a_parameter_with_gaps_gets_a_plain_view() -> None:
    parameter = torch.zeros(4, 6)[:, ::2]
    assert not is_dense(parameter)
    assert not is_dense(torch.zeros(3).expand(2, 3))
    assert view_like(torch.zeros(12), parameter).is_contiguous()
