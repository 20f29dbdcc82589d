"""The states of a step, as its script and its peers move it through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from heterotrain.errors import EndedBefore, PeerLost, RepeatStep
from heterotrain.exchange import gate as gates
from heterotrain.network.control import StepDecision
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.states import StepState, Transaction
from heterotrain.steps.step import Step
from heterotrain.steps.step_passes import StepPasses
from support.one_process import DATA, a_job, squared_error

MAY_FOLLOW = {
    StepState.OPEN: "SENT REPEAT",
    StepState.SENT: "VOTED REPEAT",
    StepState.VOTED: "APPLIED COMMITTED BETWEEN OPEN REPEAT",
    StepState.APPLIED: "COMMITTED VOTED BETWEEN REPEAT",
    StepState.BETWEEN: "OPEN REPEAT",
    StepState.COMMITTED: "",
    StepState.REPEAT: "COMMITTED",
}
"""As the page in ``transaction.py`` has it; a divided model's step is applied late in ``REPEAT``."""


class Watched:
    """A job whose step 1 is disturbed, and the states of each of its attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.job, self.model, self.optimizer = a_job(epochs=1, **settings)
        self.attempts: list[list[Transaction]] = []
        slot = StepPasses.transaction
        watched = self

        def change(step: Step, value: Transaction) -> None:
            if step.task.number == 1:
                if value.state is StepState.OPEN and not getattr(step, "passes", 0):
                    watched.attempts.append([])
                watched.attempts[-1].append(value)
            slot.__set__(step, value)  # type: ignore[attr-defined]  # a slot's descriptor

        monkeypatch.setattr(StepPasses, "transaction", property(slot.__get__, change))  # type: ignore[attr-defined]  # a slot, too

    def run(
        self, *, more: bool = False, spoil: Callable[[torch.Tensor, Step], torch.Tensor] | None = None,
        swallowed: tuple[type[Exception], ...] = (),
    ) -> list[str]:  # fmt: skip
        """Train with a script that swallows some errors; return the states of each attempt at step 1."""
        for step in self.job.steps(DATA):
            with step:
                for again in (True, False) if more else (False,):
                    with contextlib.suppress(*swallowed):
                        for x, y in step.micro_batches(more=again):
                            loss = squared_error(self.model, x, y)
                            step.backward(spoil(loss, step) if spoil is not None and step.number == 1 else loss)
                    with contextlib.suppress(*swallowed):
                        step.apply(self.optimizer)
                    if swallowed and not step.committed:
                        step.apply(self.optimizer)
        for attempt in self.attempts:
            for one, other in pairwise(attempt):
                assert other.state.name in MAY_FOLLOW[one.state].split(), attempt
        return [" ".join(each.state.name for each in attempt) for attempt in self.attempts]


APPLIED = "OPEN SENT VOTED APPLIED COMMITTED"


def disturbed(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Let the first vote on step 1 end in an error, or with that of a rank that could not finish its part."""
    vote, left = Agreement.vote, [1]

    def voting(self: Agreement, step: StepPasses, **own: bool) -> StepDecision:
        decision = vote(self, step, **own)
        if step.number == 1 and left:
            left.clear()
            if error is not None:
                raise error
            return StepDecision(False, decision.weights, decision.weight, decision.loss, (), decision.agreed)
        return decision

    monkeypatch.setattr(Agreement, "vote", voting)


def test_a_step_is_sent_before_the_vote_and_applied_before_it_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(monkeypatch).run() == [APPLIED]


def test_passes_begin_again_when_they_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(monkeypatch).run(more=True) == [f"OPEN SENT VOTED APPLIED BETWEEN {APPLIED}"]


@pytest.mark.parametrize(("behind", "path"), [(False, "VOTED COMMITTED"), (True, "VOTED APPLIED VOTED COMMITTED")])
def test_a_skipped_step_is_committed_without_its_update(
    monkeypatch: pytest.MonkeyPatch,
    behind: bool,
    path: str,  # a case
) -> None:
    """Behind a gate, what was queued has not happened."""
    monkeypatch.setattr(gates, "runs_behind", lambda _flats: behind)
    watched = Watched(monkeypatch, on_non_finite="skip")
    fused: Any = torch.optim.SGD(watched.model.parameters(), lr=0.1, fused=True)
    watched.optimizer = watched.job.optimizer(fused)

    def infinite(loss: torch.Tensor, _step: Step) -> torch.Tensor:
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    assert watched.run(spoil=infinite) == [f"OPEN SENT {path}"]
    assert all(each.skip_reason for each in watched.attempts[0][-1:])


def test_a_vote_against_the_step_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(monkeypatch, None)
    watched = Watched(monkeypatch)
    assert watched.run() == ["OPEN SENT REPEAT", APPLIED]
    failure = watched.attempts[0][-1].failure
    assert isinstance(failure, RepeatStep)
    assert not isinstance(failure, EndedBefore)


def test_an_error_that_the_script_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed(monkeypatch, None)
    watched = Watched(monkeypatch)
    assert watched.run(swallowed=(RepeatStep,)) == ["OPEN SENT REPEAT", APPLIED]


def test_memory_that_ends_before_the_vote_leaves_nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So this rank may vote against the step."""
    watched = Watched(monkeypatch)

    def short(loss: torch.Tensor, step: Step) -> torch.Tensor:
        if not step.is_retry:
            raise torch.OutOfMemoryError("too many activations")
        return loss

    assert watched.run(spoil=short) == ["OPEN REPEAT", APPLIED]
    assert not watched.attempts[0][-1].is_sent


def test_a_peer_that_is_lost_in_the_vote_may_have_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So this rank must not vote again, but ask the next formation."""
    disturbed(monkeypatch, PeerLost("gone"))
    watched = Watched(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  # a process that is alone has no next formation
        watched.run()
    last = watched.attempts[0][-1]
    assert [each.state.name for each in watched.attempts[0]] == ["OPEN", "SENT", "REPEAT"]
    assert last.is_sent
    assert isinstance(last.failure, PeerLost)


def test_an_error_in_the_update_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be half changed, so no state follows."""
    watched = Watched(monkeypatch)
    step_of = watched.optimizer.step

    def failing(*arguments: Any) -> Any:
        if watched.attempts:
            raise torch.OutOfMemoryError("no room for momentum")
        return step_of(*arguments)

    monkeypatch.setattr(watched.optimizer, "step", failing)
    with pytest.raises(torch.OutOfMemoryError):
        watched.run()
    assert [each.state.name for each in watched.attempts[0]] == ["OPEN", "SENT", "VOTED", "APPLIED"]
