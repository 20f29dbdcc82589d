"""Steps that the next vote confirms, with a gate on the CPU: which of them wait, and what confirms them earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.numerics.precision import MixedPrecision
from heterotrain.steps import agreement, observer
from heterotrain.steps.columns import CHECKPOINT, CheckpointVote
from heterotrain.steps.departure import LEAVING, Leaving
from heterotrain.steps.late import Haste
from heterotrain.steps.states import StepState
from heterotrain.steps.step import Step
from support.late_training import BATCH, DATA, Net, Trained, batches, decay, equal, plain, sgd


def test_a_step_is_confirmed_right_before_the_next_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the next one is computed. The first one and the last one of an epoch do not wait."""
    trained = Trained(monkeypatch)
    equal(trained.run(), plain())
    assert " ".join(trained.order) == (
        "forward 0 vote 0 commit 0 applied 0 forward 1 vote 1 applied 1 forward 2 commit 1 vote 2 applied 2 "
        "forward 3 commit 2 vote 3 applied 3 forward 4 commit 3 vote 4 commit 4 applied 4"
    )
    now = Trained(monkeypatch)
    now.run(confirm="now")
    assert now.kinds() == "NNNNN"
    for one, other in zip(trained.results, now.results, strict=True):
        assert (one.loss, one.learning_rates, one.samples, one.weight) == (
            other.loss, other.learning_rates, other.samples, other.weight,
        )  # fmt: skip
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-12)
        assert one.skip_reason == other.skip_reason == ""


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    with pytest.raises(heterotrain.UsageError, match='confirm must be "late" or "now"'):
        trained.run(confirm="later")


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a measured step": ("NLNLN", {"measured": (2,)}, {}),
    "two passes": ("NLNLN", {}, {"more": 2}),
    "a limit for elements": ("NNNNN", {}, {"clip_value": 100.0}),
    "a limit for the norm": ("NLLLN", {}, {"clip_norm": 0.1}),
    "the last step": ("NLN", {"steps": 3, "epochs": None}, {}),
    "a stream": ("NNNNN", {}, {"data": [(x, y) for _, xs, ys in batches(1) for x, y in zip(xs, ys, strict=True)]}),
}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from DATA


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_wait_is_confirmed_in_apply(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    kinds, settings, arguments = CASES[case]
    if "data" in arguments:
        arguments = {"data": Stream()}
    trained = Trained(monkeypatch, **{name: value for name, value in settings.items() if value is not None})
    trained.run(**arguments)
    assert trained.kinds() == kinds


@pytest.mark.parametrize(
    "agreed", [{CHECKPOINT: CheckpointVote(is_due=True, mark=1)}, {LEAVING: Leaving(waiting=(0,))}]
)
def test_what_ranks_have_agreed_on_does_not_wait(monkeypatch: pytest.MonkeyPatch, agreed: dict[Any, Any]) -> None:
    trained = Trained(monkeypatch)
    trained.agreed[2] = agreed
    equal(trained.run(), plain())
    assert trained.kinds() == "NLNLN"


def test_hooks_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see the weights of a committed step."""
    trained = Trained(monkeypatch)
    seen = []
    trained.job.every_steps(3)(lambda steps: seen.append((steps, trained.job._training.progress.steps)))
    equal(trained.run(), plain())
    assert trained.kinds() == "NLNLN"
    assert seen == [(3, 3)]


def test_the_first_step_of_an_optimizer_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a closed gate it would keep a momentum that nobody has set."""
    trained = Trained(monkeypatch)
    group = trained.optimizers[0].param_groups[0]
    other = trained.job.optimizer(sgd(group["params"][-2:]))
    group["params"] = group["params"][:-2]

    def begin(step: Step) -> None:
        if step.number == 2 and other not in trained.optimizers:
            trained.optimizers.append(other)

    trained.run(before=begin)
    assert trained.kinds() == "NLNLN"


def test_the_factor_on_the_loss_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16, the next backward pass needs the one that follows from this step."""
    trained = Trained(monkeypatch)
    monkeypatch.setattr(MixedPrecision, "agree", lambda precision, _group: setattr(precision, "scales_loss", True))
    trained.run()
    assert trained.kinds() == "NNNNN"


def test_a_gradient_that_the_script_has_changed_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    apply = Step.apply

    def changing(step: Step, *arguments: Any) -> Any:
        if step.number == 2:
            for parameter in trained.model.parameters():
                parameter.grad.mul_(0.5)
        return apply(step, *arguments)

    monkeypatch.setattr(Step, "apply", changing)
    trained.run()
    assert trained.kinds() == "NLNLN"


def test_copies_that_differ_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is sent to all ranks before the next step."""
    trained = Trained(monkeypatch)

    def differ(step: Step) -> None:
        if step.number == 2:
            trained.job._loop._replicas.donor = 0

    trained.run(inside=differ)
    assert trained.kinds() == "NLNLN"


def test_each_reason_is_enough() -> None:
    assert not any(Haste())
    for name in Haste._fields:
        assert any(Haste(**{name: True})), name


ASKS: dict[str, tuple[str, Callable[[Step, Any], object]]] = {
    "committed": ("E", lambda step, _result: step.committed),
    "step.skipped": ("E", lambda step, _result: not step.skipped),
    "skipped": ("E", lambda _step, result: not result.skipped),
    "reason": ("E", lambda _step, result: result.skip_reason == ""),
    "norm": ("L", lambda _step, result: result.gradient_norm > 0.0),
    "loss": ("L", lambda _step, result: result.loss > 0.0 and result.learning_rate > 0.0),
}


@pytest.mark.parametrize("what", ASKS)
def test_a_script_that_asks_confirms_the_step(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What follows from the vote or from the gate alone, it may look at."""
    kind, ask = ASKS[what]
    trained = Trained(monkeypatch)
    told = []

    def after(step: Step, result: Any) -> None:
        if step.number == 2:
            told.append(ask(step, result))

    equal(trained.run(after=after), plain())
    assert told == [True]
    assert trained.kinds() == f"NL{kind}LN"


@pytest.mark.parametrize("asks", [False, True])
def test_all_ranks_measure_the_same_steps(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:  # a case
    """Also those that confirm a step earlier. Else ranks would compare fingerprints of different slices."""
    trained = Trained(monkeypatch)
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(observer, "LEARN_STEPS", 3)
    monkeypatch.setattr(observer, "is_measured", lambda *chosen: bool(found.append(chosen)))
    for number in range(5):
        trained.agreed[number] = {observer.MEASURED: observer.Measurements((), (), 8 << number, ())}
    trained.run(after=lambda step, _result: asks and step.committed)
    assert found == [(0, 2), (1, 2), (2, 2), (3, 8 << 2), (4, 8 << 3)]


def test_fit_waits_only_where_the_script_has_no_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or wants to hear of each committed step."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        output: torch.Tensor = model(batch[0])
        return ((output - batch[1]) ** 2).mean()

    for own, told, expected in ((False, None, {1, 2, 3}), (True, None, set()), (False, lambda *_: None, set())):
        trained = Trained(monkeypatch)
        waits: set[int] = set()
        queue = agreement.Agreement.queue

        def queueing(self: Any, step: Any, *arguments: Any, waits: set[int] = waits, queue: Any = queue) -> None:
            queue(self, step, *arguments)
            waits.add(step.number)

        with monkeypatch.context() as patch:
            patch.setattr(agreement.Agreement, "queue", queueing)
            job = heterotrain.init(epochs=1, batch_samples=BATCH)
            if own:
                job.register("mine", torch.nn.Linear(1, 1))
            model = Net()
            heterotrain.fit(model, DATA, loss=loss, optimizer=sgd, scheduler=decay, on_step=told, job=job)
        equal({name: value.detach() for name, value in model.state_dict().items()}, plain())
        commits = [trained.order.index(f"commit {number}") for number in waits]
        nexts = [trained.order.index(f"vote {number + 1}") for number in waits]
        assert all(one + 1 == other for one, other in zip(commits, nexts, strict=True)) or told is not None
        assert (waits if told is None else set()) == expected


def test_a_step_is_queued_and_then_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that a script's step goes through, and what a second ``apply`` gets."""
    trained = Trained(monkeypatch)
    states = []

    def after(step: Step, _result: Any) -> None:
        states.append(step.transaction.state)
        if step.number == 2:
            with pytest.raises(heterotrain.UsageError, match="step 2 is already applied"):
                step.apply(*trained.optimizers)

    trained.run(after=after)
    assert states == [StepState.COMMITTED, *3 * [StepState.QUEUED], StepState.COMMITTED]
