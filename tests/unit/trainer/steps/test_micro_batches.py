"""The size of micro-batches that a script sets, in one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from heterotrain import UsageError
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.steps.step import Step
from heterotrain_core.contract import metrics
from support.one_process import DATA, a_job, squared_error


def test_the_first_micro_batch_has_the_size_set_by_the_script_and_memory_halves_it() -> None:
    """The whole share is not tried first; out of memory halves the size from there, and the metric says so."""
    job, model, optimizer = a_job(epochs=1, micro_batch_samples=6)
    reported: list[dict[str, float]] = []
    job._report.gauges = reported.append  # type: ignore[method-assign]  # a deliberate wrapper
    sizes = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                sizes.append(len(x))
                if len(x) > 3:
                    raise torch.OutOfMemoryError("too much")
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
    assert sizes == [2, 6, 2, 3, 3, 2, 3, 3, 1, 3]
    assert [g[metrics.MICRO_BATCH_CAP] for g in reported if metrics.MICRO_BATCH_CAP in g] == [3.0]
    plain = a_job(epochs=1)
    for step in plain[0].steps(DATA):
        with step:
            for x, y in step.micro_batches():
                step.backward(squared_error(plain[1], x, y))
            step.apply(plain[2])
    torch.testing.assert_close(model.weight, plain[1].weight, rtol=1e-12, atol=0)


def test_the_size_is_exported_for_the_operator_before_the_first_step() -> None:
    """Its split counts the micro-batches that a share needs."""
    job, *_ = a_job(micro_batch_samples=6)
    assert job._report.current()[metrics.MICRO_BATCH_CAP] == 6.0


@pytest.mark.parametrize("size", [0, -4, 1.5, "8"])
def test_a_size_is_a_whole_number_of_at_least_one(size: object) -> None:
    """It is refused by ``init``."""
    with pytest.raises(UsageError, match="micro_batch_samples must be a whole number of at least 1"):
        a_job(micro_batch_samples=size)


class Activations(torch.autograd.Function):
    """Runs out of memory for more than three rows, by an allocation that no machine can serve."""

    held: weakref.ref[torch.Tensor] | None = None

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        activation = x.clone()
        if len(x) > 3:
            Activations.held = weakref.ref(activation)
            torch.empty(1 << 60)
        return activation

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradients[0]


def test_torchs_own_error_on_a_cpu_halves_the_micro_batch_and_nothing_keeps_the_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a plain RuntimeError, and its traceback holds the frames of the model; the vote needs memory, too."""
    job, model, optimizer = a_job(epochs=1)
    held, vote = [], Step._vote_to_repeat

    def voted(self: Step) -> None:
        held.append(Activations.held is not None and Activations.held() is not None)
        vote(self)

    monkeypatch.setattr(Step, "_vote_to_repeat", voted)
    model.register_forward_pre_hook(lambda _model, inputs: (Activations.apply(inputs[0]),))
    sizes = []
    for step in job.steps(DATA):
        if step.is_retry:
            assert Activations.held is not None
            assert Activations.held() is None
        with step:
            for x, y in step.micro_batches():
                sizes.append(len(x))
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert held == [False, False]


@pytest.mark.parametrize(
    "text",
    ["CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error: out of memory\nhint"],
)
def test_errors_of_cudas_libraries_count_as_out_of_memory(text: str) -> None:
    """Other errors, which a smaller micro-batch does not mend, end the job."""
    assert isinstance(out_of_memory(RuntimeError(text)), torch.OutOfMemoryError)
    assert out_of_memory(RuntimeError("CUDA error: device-side assert triggered")) is None
    assert out_of_memory(ValueError(text)) is None
