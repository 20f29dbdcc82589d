"""Loops that are ordinary elsewhere and cannot work in a job: each ends with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import heterotrain
import torch
from distributed.scripts import net, optimizer_of, problem

SAMPLES, BATCH = 96, 16


def train(*, out: str, habit: str) -> None:  # every script gets the folder
    """Run one of these scripts."""
    job = heterotrain.init(epochs=1, batch_samples=BATCH)
    model = job.wrap(net())
    REFUSED[habit][0](job, model, job.optimizer(optimizer_of(model)))


def loader(job: heterotrain.Job, _model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Pass a DataLoader as the data set."""
    for _step in job.steps(torch.utils.data.DataLoader(problem(SAMPLES), batch_size=BATCH)):
        raise AssertionError("a step was made")


def plain_backward(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Call backward of the loss itself."""
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                (model(x) - y).square().mean().backward()
            step.apply(optimizer)


def accumulation(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Accumulate by hand: an update after every second step only."""
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                step.backward((model(x) - y).square().mean() / 2)
            if step.number % 2:
                step.apply(optimizer)


def scaler(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Scale losses as for mixed precision, with an update by the scaler."""
    scale = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                step.backward(scale.scale((model(x) - y).square().mean()))
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()


def registered_scaler(job: heterotrain.Job, _model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Keep the scaler's state with that of the job."""
    job.register("scaler", torch.amp.GradScaler("cpu"))


def plateau(job: heterotrain.Job, _model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the job step a scheduler that needs a metric."""
    job.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def closure(job: heterotrain.Job, model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    """Use an optimizer that evaluates the loss several times."""
    job.optimizer(torch.optim.LBFGS(model.parameters()))


def clipping_in_the_loop(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip after each backward pass, inside the loop over micro-batches."""
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                step.backward((model(x) - y).square().mean())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            step.apply(optimizer)


def old_order(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer itself."""
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                step.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def evaluation(job: heterotrain.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add up a metric after the update, where nothing would repeat it."""
    for step in job.steps(problem(SAMPLES)):
        with step:
            for x, y in step.micro_batches():
                step.backward((model(x) - y).square().mean())
            step.apply(optimizer)
        job.sum(samples=step.share_samples)


Habit = Callable[[heterotrain.Job, torch.nn.Module, torch.optim.Optimizer], None]
REFUSED: dict[str, tuple[Habit, str]] = {
    "loader": (loader, "job.steps takes the data set itself, not a DataLoader"),
    "plain_backward": (plain_backward, "call step.backward for each one"),
    "accumulation": (accumulation, "To accumulate gradients, set a larger global batch"),
    "scaler": (scaler, "step.apply(optimizer) in place of optimizer.step"),
    "registered_scaler": (registered_scaler, "job.register got a GradScaler"),
    "plateau": (plateau, "ReduceLROnPlateau follows a metric, not steps"),
    "closure": (closure, "LBFGS"),
    "clipping_in_the_loop": (clipping_in_the_loop, "clip_norm=…"),
    "old_order": (old_order, "step.apply(optimizer) in place of optimizer.step"),
    "evaluation": (evaluation, "job.sum can be used inside `with step:` before step.apply, and in hooks"),
}
"""Each script, and words of the sentence that it ends with."""
