"""Signals in one process without an operator: the step ends, the exit code says that the training has not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.storage import Storage
from heterotrain.stop_signals import StopSignals
from heterotrain.termination_message import TerminationMessage

DATA = torch.utils.data.TensorDataset(torch.ones(24, 1))


@pytest.fixture(autouse=True)
def _tidy(own_process: None) -> Iterator[None]:
    """Undo the changes of ``init`` to the process after each test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Average:
    """Counts its updates, as averaged weights would be updated after each step."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def train(
    at_step: Callable[[int], Any],
    *,
    before: Callable[[], Any] = lambda: None,
    average: Average | None = None,
    **settings: Any,
) -> list[int]:
    """Train for six steps and return those that were committed.

    ``before`` is called after ``init``, ``at_step`` in each step; ``average`` is registered and updated after each.
    """
    job = heterotrain.init(batch_samples=8, epochs=2, **settings)
    model = job.wrap(torch.nn.Linear(1, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    if average is not None:
        job.register("average", average)
    before()
    done = []
    for step in job.steps(DATA):
        with step:
            at_step(step.number)
            for (x,) in step.micro_batches():
                step.backward(model(x).mean())
            step.apply(optimizer)
        if average is not None:
            average.updates += 1
        done.append(step.number)
    return done


def terminated_at(step: int) -> Callable[[int], None]:
    """Return a function that sends SIGTERM to this process in one step."""

    def send(number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return send


def test_an_unfinished_training_does_not_end_with_success(tmp_path: Path) -> None:
    """The exit code is 143, the step is saved, and the next run continues after it."""
    with pytest.raises(SystemExit) as ended:
        train(terminated_at(2), checkpoint_uri=tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM
    newest = CheckpointFolder(tmp_path, max_to_keep=1).load_newest()
    assert newest is not None
    assert newest[0].step == 3
    assert train(lambda _step: None, checkpoint_uri=tmp_path) == [3, 4, 5]


def test_the_outcome_has_the_checkpoint_that_was_written_after_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No scrape follows it. A run that can write none has the one that it continued from."""
    made: list[TerminationMessage] = []

    class Kept(TerminationMessage):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    def refuses(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("heterotrain.session.TerminationMessage", Kept)
    with pytest.raises(SystemExit):
        train(terminated_at(2), checkpoint_uri=tmp_path)
    newest = CheckpointFolder(tmp_path, max_to_keep=1).newest()
    assert newest is not None
    monkeypatch.setattr("heterotrain.checkpoints.storage.PAUSES_S", (0.0,))
    monkeypatch.setattr(Storage, "put", refuses)
    with pytest.raises(SystemExit):
        train(terminated_at(4), checkpoint_uri=tmp_path)
    outcomes = [message.outcome for message in made if message.outcome is not None]
    assert [outcome.step for outcome in outcomes] == [3, 5]
    assert [(o.checkpoint_step, o.checkpoint_time_s) for o in outcomes] == 2 * [(3, newest.written_unix_s)]


def test_the_last_checkpoint_holds_what_the_script_did_after_the_step(tmp_path: Path) -> None:
    """State that the script updates after ``step.apply`` is as new as the weights."""
    with pytest.raises(SystemExit):
        train(terminated_at(2), average=Average(), checkpoint_uri=tmp_path)
    newest = CheckpointFolder(tmp_path, max_to_keep=1).load_newest()
    assert newest is not None
    assert (newest[0].step, newest[1]["extras"]["average"]["updates"]) == (3, 3)


def test_after_sigterm_in_the_last_step_the_next_run_only_ends(tmp_path: Path) -> None:
    """The hooks of the last epoch and the rest of the script have not run, so that this was no success either."""
    with pytest.raises(SystemExit) as ended:
        train(terminated_at(5), checkpoint_uri=tmp_path)
    assert ended.value.code == 143
    assert train(lambda _step: None, checkpoint_uri=tmp_path) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_handler_of_the_script_runs_too(late: bool) -> None:
    """It may be installed before ``init`` or between ``init`` and ``job.steps``."""
    heard: list[int] = []

    def install() -> None:
        signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))

    if not late:
        install()
    with pytest.raises(SystemExit) as ended:
        train(terminated_at(1), before=install if late else lambda: None)
    assert (heard, ended.value.code) == ([signal.SIGTERM], 143)


def test_a_handler_that_calls_the_earlier_one_does_not_call_itself_for_ever() -> None:
    """A script that chains handlers on its own hears each signal once."""
    heard: list[int] = []

    def install() -> None:
        earlier: Any = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            heard.append(number)
            earlier(number, frame)

        signal.signal(signal.SIGTERM, handle)

    with pytest.raises(SystemExit):
        train(terminated_at(1), before=install)
    assert heard == [signal.SIGTERM]


def test_a_handler_that_exits_waits_for_the_step(tmp_path: Path) -> None:
    """The usual ``sys.exit(0)`` in a handler must not tear the step in two, nor report success."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with pytest.raises(SystemExit) as ended:
        train(terminated_at(2), checkpoint_uri=tmp_path)
    assert ended.value.code == 143
    newest = CheckpointFolder(tmp_path, max_to_keep=1).load_newest()
    assert newest is not None
    assert newest[0].step == 3


def test_after_the_training_such_a_handler_ends_the_process() -> None:
    """The rest of the script belongs to the script."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    train(lambda _step: None)
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 0


def interrupts(handled: StopSignals | None = None) -> StopSignals:
    """Return handlers with a clock that stands still, in a training that has begun."""
    found = handled or StopSignals(lambda _number: None, now_s=lambda: 0.0)
    found.begin()
    return found


def test_an_interrupt_that_comes_twice_at_once_is_one() -> None:
    """The terminal sends it to all processes, and the launcher passes it on."""
    requested: list[signal.Signals] = []
    handlers = interrupts(StopSignals(requested.append, now_s=lambda: 0.0))
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    handlers.end()
    assert requested == [signal.SIGINT, signal.SIGINT]


def test_an_interrupt_before_and_after_the_training_is_python_s() -> None:
    """There is no step to finish."""
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(lambda _step: None, before=lambda: signal.raise_signal(signal.SIGINT))
    train(lambda _step: None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_of_the_script_gives_the_interrupt_back() -> None:
    """The training is over then, too."""
    with pytest.raises(ZeroDivisionError):
        train(lambda step: 1 // step)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_script_hears_an_interrupt_too() -> None:
    """And cannot end the process in the middle of a step."""
    heard: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    handlers = interrupts()
    signal.raise_signal(signal.SIGINT)
    handlers.end()
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handle


def test_a_process_that_ignores_interrupts_goes_on_to_do_so() -> None:
    """As those that ``nohup`` or a shell starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers = interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    handlers.end()


def test_after_an_interrupt_the_checkpoint_may_take_its_time(tmp_path: Path) -> None:
    """Nobody kills the process, unlike after SIGTERM; the exit code is that of an interrupted program."""

    def send(step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        train(send, checkpoint_uri=tmp_path)
    assert ended.value.code == 130
    assert isinstance(ended.value, KeyboardInterrupt)
    newest = CheckpointFolder(tmp_path, max_to_keep=1).newest()
    assert newest is not None
    assert newest.step == 3
