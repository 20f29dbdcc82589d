"""Steps that the next vote confirms, with a gate on the CPU: closed gates, losses, and scripts that leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heterotrain.errors import NonFinite, PeerLost, RepeatStep
from heterotrain.steps import agreement
from heterotrain.steps.step import Step
from support.late_training import DATA, Closing, Trained, equal, plain


@pytest.mark.parametrize("spoil", [1, 2, 3])
def test_a_skipped_step_is_repeated_first(monkeypatch: pytest.MonkeyPatch, spoil: int) -> None:
    """All ranks vote against the next one, whose passes have spoilt buffers; then the host looks at the gradient."""
    trained = Trained(monkeypatch, on_non_finite="skip")
    retries: list[int] = []
    found = trained.run(spoil=spoil, before=lambda step: retries.extend([step.number] * step.is_retry))
    equal(found, plain(skipped=spoil))
    assert retries == [spoil, spoil + 1]
    assert f"against {spoil + 1} forward {spoil} vote {spoil} commit {spoil}" in " ".join(trained.order)
    assert [order for order in trained.order if order.startswith("commit")] == [f"commit {n}" for n in range(5)]
    reasons = [bool(result.skip_reason) for result in trained.results]
    assert reasons.count(True) == 2  # of the attempt that did not happen, and of the step
    assert any("the gradient of first.weight is not" in result.skip_reason for result in trained.results)


def test_an_error_names_the_step_and_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes one step later, with weights and buffers from before the step."""
    trained = Trained(monkeypatch)
    with pytest.raises(NonFinite, match=r"step 2 is finite, but the gradient of first\.weight is not"):
        trained.run(spoil=2)
    assert trained.job._training.progress.steps == 2
    expected = plain(steps=2)
    equal(dict(trained.model.named_parameters()), {n: expected[n] for n, _ in trained.model.named_parameters()})


def test_a_finite_gradient_with_an_infinite_norm_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is repeated, and the host tells it from an infinity."""
    trained = Trained(monkeypatch)
    skipped = []
    for step in trained.job.steps(DATA, confirm="late"):
        with step:
            for x, y in step.micro_batches():
                step.backward(((trained.model(x) - y) ** 2).mean() * (1e200 if step.number == 2 else 1.0))
            step.apply(*trained.optimizers)
        if step.number == 3 and step.is_retry:
            break
        if step.number == 2 and step.is_retry:
            skipped.append((step.committed, step.skipped, bool(trained.model.last.bias.detach().abs().max() > 1e100)))
            break
    assert skipped == [(True, False, True)]


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("place", ["before the pass", "in the pass", "in the vote"])
def test_a_loss_repeats_one_step_or_two(monkeypatch: pytest.MonkeyPatch, place: str, closes: bool) -> None:  # a case
    """Where the gate was open, the step before is committed, once, and nothing of it is repeated."""
    trained = Trained(monkeypatch)
    closing = Closing(monkeypatch, trained, 2, closes=closes)
    nothing: Any = {}
    if place == "in the vote":
        confirm = agreement.Agreement.vote

        def vote(self: Any, step: Any, **own: Any) -> Any:
            closing.lose(step)
            return confirm(self, step, **own)

        monkeypatch.setattr(agreement.Agreement, "vote", vote)
    else:
        nothing = {"inside": closing.lose} if place == "in the pass" else {}
        if not nothing:
            enter = Step.micro_batches

            def entering(step: Step, **arguments: Any) -> Any:
                closing.lose(step)
                return enter(step, **arguments)

            monkeypatch.setattr(Step, "micro_batches", entering)
    equal(trained.run(**nothing), plain())
    assert not closing.left
    assert [order for order in trained.order if order.startswith("commit")] == [f"commit {n}" for n in range(5)]
    assert trained.order.count("vote 2") == 1 + closes
    assert trained.order.count("applied 2") == 1 + closes


@pytest.mark.parametrize("closes", [False, True])
def test_a_step_that_is_repeated_while_another_waits_starts_from_its_own_buffers(
    monkeypatch: pytest.MonkeyPatch,
    closes: bool,  # a case
) -> None:
    """Three attempts at step 3, while step 2 waits; it is committed, or all of it is undone."""
    trained = Trained(monkeypatch)
    closing = Closing(monkeypatch, trained, 2, closes=closes)
    closing.left = [RepeatStep("short"), RepeatStep("short"), PeerLost("gone")]  # type: ignore[list-item]  # in reverse
    equal(trained.run(inside=closing.lose), plain())
    assert not closing.left
    assert trained.order.count("applied 2") == 1 + closes


@pytest.mark.parametrize("closes", [False, True])
def test_a_script_that_leaves_keeps_what_is_committed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    closes: bool,  # a case
) -> None:
    """The checkpoint is that of the newest step whose gate was open, whatever the next one has done to buffers."""
    trained = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    Closing(monkeypatch, trained, 2, closes=closes)

    def leave(step: Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained.run(inside=leave)
    assert trained.job._training.progress.steps == 3 - closes
    again = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    equal(again.run(), plain())
    assert again.order[0] == f"forward {3 - closes}"


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_waits_when_another_loop_begins(monkeypatch: pytest.MonkeyPatch, rank: int, closes: bool) -> None:
    """On no rank: ranks compare their data before the first step of a loop."""
    trained = Trained(monkeypatch)
    Closing(monkeypatch, trained, 2, closes=closes)
    loop = trained.job._loop
    loop._identity = replace(loop._identity, rank=rank)
    for step in trained.job.steps(DATA, confirm="late"):
        with step:
            for x, y in step.micro_batches():
                step.backward(((trained.model(x) - y) ** 2).mean())
            step.apply(*trained.optimizers)
        if step.number == 2:
            break
    assert trained.job._training.progress.steps == 3 - closes
    equal(trained.run(), plain())


@pytest.mark.parametrize("where", ["after", "inside the next"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_script_ends_the_training_with_a_step_that_waits(
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    closes: bool,  # a case
) -> None:
    """The step counts like a committed one: it is the last, or the one before the last."""
    trained = Trained(monkeypatch)
    Closing(monkeypatch, trained, 2, closes=closes)

    def finish(step: Step, *_result: Any) -> None:
        if step.number == (2 if where == "after" else 3) and not trained.job._loop.shutdown.reason:
            trained.job.finish("enough")

    found = trained.run(**{"after" if where == "after" else "inside": finish})  # type: ignore[arg-type]  # one of two
    steps = 3 if where == "after" else 4
    assert trained.job._training.progress.steps == steps
    equal(found, plain(steps=steps))
