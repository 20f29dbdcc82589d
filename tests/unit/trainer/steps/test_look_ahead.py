"""Loading a step's samples while the device computes the step before; forced here, because the device is a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.data.batches import pinned
from heterotrain.errors import RepeatStep, UsageError
from heterotrain.steps.batch_loader import BatchLoader


class Shrinking(torch.utils.data.Dataset[Any]):
    """A data set of which samples disappear."""

    samples = 20

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)


class Recorded(torch.utils.data.Dataset[Any]):
    """Samples with noise from the global generator; notes what is loaded, and fails at a sample as often as asked."""

    def __init__(self, events: list[Any], *, fails: int = -1, times: int = 0) -> None:
        self._events, self._fails, self._times = events, fails, times

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self._fails and self._times:
            self._times -= 1
            raise OSError("the disk is gone")
        self._events.append(index)
        x = torch.randn(3, dtype=torch.float64)
        return x + index, x.sum(0, keepdim=True)


@pytest.fixture(params=[False, True])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether batches are loaded ahead."""
    made = BatchLoader.__init__

    def make(self: BatchLoader, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.looks_ahead = request.param

    monkeypatch.setattr(BatchLoader, "__init__", make)
    return bool(request.param)


def train(dataset: Recorded, events: list[Any], *, micro: int | None = None, repeats: int = -1) -> torch.Tensor:
    """Train two epochs in steps of 8 samples and return the weights; the step ``repeats`` is tried twice."""
    torch.manual_seed(3)
    job = heterotrain.init(epochs=2, batch_samples=8, micro_batch_samples=micro)
    model = job.wrap(torch.nn.Linear(3, 1).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    for step in job.steps(dataset, shuffle=False):
        if not step.number and not step.is_retry:
            events.clear()  # a few samples were read before, for the fingerprint of the data set
        with step:
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            if step.number == repeats and not step.is_retry:
                raise RepeatStep("injected")
            step.apply(optimizer)
            events.append(f"step {step.number}")
    return torch.cat([p.detach().flatten() for p in model.parameters()])


EXPECTED: dict[Any, torch.Tensor] = {}


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("repeats", [-1, 0, 2])
def test_loading_ahead_gives_the_same_training(ahead: bool, micro: int | None, repeats: int) -> None:
    """Each batch is that of its place in the epoch, with its own random numbers, also where a step is repeated."""
    events: list[Any] = []
    found = train(Recorded(events), events, micro=micro, repeats=repeats)
    torch.testing.assert_close(found, EXPECTED.setdefault(micro, found), rtol=0, atol=0)


def test_samples_of_the_next_step_are_loaded_before_this_one_ends(ahead: bool) -> None:
    """Not across the end of an epoch, because the hooks there may change the data set."""
    events: list[Any] = []
    train(Recorded(events), events)
    first, second, third = [list(range(start, min(start + 8, 20))) for start in (0, 8, 16)]
    expected: list[Any] = []
    for step in (0, 3):
        names = [f"step {step + number}" for number in range(3)]
        if ahead:
            expected += [*first, *second, names[0], *third, names[1], names[2]]
        else:
            expected += [*first, names[0], *second, names[1], *third, names[2]]
    assert events == expected


def test_an_error_ahead_of_time_appears_in_its_own_step(ahead: bool) -> None:
    """The step before is committed; a fault that has passed by then is none."""
    events: list[Any] = []
    with pytest.raises(OSError, match="the disk is gone"):
        train(Recorded(events, fails=9, times=2), events)
    assert events[-1] == 8
    assert "step 0" in events
    assert "step 1" not in events
    events.clear()
    train(Recorded(events, fails=9, times=1), events)
    assert events[-1] == "step 5"


class Staged(torch.utils.data.Dataset[Any]):
    """Samples that depend on the epoch, which the script sets."""

    epoch = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(self.epoch), dtype=torch.float64), torch.ones(1, dtype=torch.float64)


def test_an_epoch_that_is_continued_is_read_when_the_script_has_set_up_its_data(ahead: bool, tmp_path: Path) -> None:
    """As one that begins."""
    found: list[float] = []
    for last in (3, 5):
        job = heterotrain.init(epochs=2, batch_samples=8, checkpoint_uri=str(tmp_path))
        model, dataset = job.wrap(torch.nn.Linear(3, 1).double()), Staged()
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
        for step in job.steps(dataset):
            with step:
                dataset.epoch = step.epoch
                for x, y in step.micro_batches():
                    found.append(float(x.mean()))
                    step.backward(((model(x) - y) ** 2).mean())
                step.apply(optimizer)
            if step.number == last:
                break
    assert found == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def train_while_it_shrinks(dataset: Shrinking, committed: list[int]) -> None:
    """Train in steps of 8 samples; 4 samples are left when the first step is computed."""
    job = heterotrain.init(epochs=1, batch_samples=8)
    model = job.wrap(torch.nn.Linear(3, 1).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    for step in job.steps(dataset, shuffle=False):
        with step:
            for x, y in step.micro_batches():
                dataset.samples = 4
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
            committed.append(step.number)


def test_a_data_set_that_shrinks_ends_the_step_that_needs_it(ahead: bool) -> None:
    """The step that is being computed is committed, because its samples were there."""
    committed: list[int] = []
    with pytest.raises(UsageError, match="epoch 0 has 4 samples, but 8 are already committed"):
        train_while_it_shrinks(Shrinking(), committed)
    assert committed == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here page-locked memory can be had")
def test_a_batch_for_which_there_is_no_page_locked_memory_stays_as_it_is() -> None:
    """It is copied more slowly."""
    batch = [torch.ones(2, 3)]
    assert pinned(batch, torch.device("cuda"))[0] is batch[0]
