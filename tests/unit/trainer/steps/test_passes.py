"""Several passes over the micro-batches of one step, in one process."""

from __future__ import annotations

from typing import Any

import heterotrain
import pytest
import torch
from heterotrain import Step, UsageError
from heterotrain.errors import RepeatStep
from heterotrain.state.weight_copies import WeightCopies
from support import passes
from support.one_process import DATA, a_job, squared_error


def train(kind: str, at: Any, **settings: Any) -> tuple[heterotrain.Job, dict[str, torch.Tensor]]:
    """Train two epochs of 20 samples and return the job with the weights; ``at`` gets each step and place."""
    job = heterotrain.init(epochs=2, batch_samples=8, **settings)
    model: Any = job.wrap(passes.model())
    both = [job.optimizer(optimizer) for optimizer in passes.optimizers(model)]
    for step in job.steps(passes.data(20)):
        with step:
            passes.STEPS[kind](step, model, both, lambda place, step=step: at(step, place))
    return job, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", passes.STEPS)
@pytest.mark.parametrize("place", ["never", "first", "between", "second"])
def test_a_step_of_several_passes_trains_like_plain_torch(kind: str, place: str) -> None:
    """Micro-batches of unequal size; where one attempt fails, weights and optimizers are as before the step."""
    failed: list[int] = []

    def at(step: Step, reached: str) -> None:
        if reached == place and step.number in (0, 4) and step.number not in failed:
            failed.append(step.number)
            raise RepeatStep("injected")

    _, found = train(kind, at, micro_batch_samples=3)
    assert failed == ([] if place == "never" else [0, 4])
    torch.testing.assert_close(found, passes.plain(kind, samples=20, epochs=2, batch=8), rtol=1e-10, atol=1e-14)


def test_out_of_memory_in_a_later_pass_repeats_the_step_with_smaller_micro_batches() -> None:
    """The discriminator's update of the first attempt is undone, with its optimizer's moments."""

    def at(step: Step, place: str) -> None:
        if place == "second" and max(step.task.micro_batches) > 4:
            raise torch.OutOfMemoryError("too much")

    _, found = train("gan", at)
    torch.testing.assert_close(found, passes.plain("gan", samples=20, epochs=2, batch=8), rtol=1e-10, atol=1e-14)


def test_both_passes_see_the_same_batches_loaded_once() -> None:
    """A data set that augments at random, or loads slowly, is asked once for each sample of a step."""
    loaded: list[int] = []

    class Counting(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            loaded.append(index)
            return DATA[index]

    job, model, optimizer = a_job(epochs=1, micro_batch_samples=3)
    for step in job.steps(Counting()):
        loaded.clear()  # the record of the run has looked at some
        with step:
            first = []
            for x, y in step.micro_batches(more=True):
                first.append(x)
                step.backward(squared_error(model, x, y))
            second = []
            for x, y in step.micro_batches():
                second.append(x)
                step.backward(squared_error(model, x, y))
            step.apply(optimizer)
        assert all(one is other for one, other in zip(first, second, strict=True))
    assert sorted(loaded) == list(range(8))


MISTAKES = {
    "again without more": r"loops over its micro-batches again.*micro_batches\(more=True\)",
    "applied twice": r"is already applied: call step\.apply once.*more=True",
    "no last pass": r"without step\.apply\(optimizer\): call it after the last loop.*without more=True",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_passes_are_reported(mistake: str) -> None:
    """Each message names the remedy."""
    job, model, optimizer = a_job()

    def one_pass(step: Step, *, more: bool) -> None:
        for x, y in step.micro_batches(more=more):
            step.backward(squared_error(model, x, y))

    def loop() -> None:
        for step in job.steps(DATA):
            with step:
                one_pass(step, more=mistake != "again without more")
                if mistake == "again without more":
                    one_pass(step, more=False)
                else:
                    step.apply(optimizer)
                if mistake == "applied twice":
                    step.apply(optimizer)

    with pytest.raises(UsageError, match=MISTAKES[mistake]):
        loop()


def test_copies_restore_values_that_a_step_has_added() -> None:
    """An optimizer that makes its state in its first step, or counts in its groups, is as before that step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copies = WeightCopies()
    copies.keep_weights(model)
    copies.keep_optimizers([optimizer])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["k"] = 1
    copies.keep_weights(model)
    copies.keep_optimizers([optimizer])
    copies.restore()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not optimizer.state
    assert "k" not in optimizer.param_groups[0]
