"""What a script changes while a step waits: a step that is repeated finds it as it was, or does not wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.steps.step import Step
from support.late_training import Closing, Trained, equal

SPOILT = 2


class Average:
    """A moving average of the script's own, and how often it was updated."""

    def __init__(self) -> None:
        self.mean, self.updates = torch.zeros((), dtype=torch.float64), 0

    def update(self, model: Any) -> None:
        self.mean, self.updates = self.mean * 0.5 + model.last.weight.detach().sum(), self.updates + 1

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.updates = state["mean"], state["updates"]


class Script:
    """Code in the loop's body: ``before`` a step, and ``after`` its update."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.model = trained, trained.model

    def before(self, step: Step) -> None:
        """Run before the step."""

    def after(self, step: Step, _result: Any) -> None:
        """Run after the update."""


class Registered(Script):
    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.average = trained.job.register("average", Average())

    def after(self, _step: Step, _result: Any) -> None:
        self.average.update(self.model)


class Buffer(Script):
    def after(self, _step: Step, _result: Any) -> None:
        self.model.count.add_(self.model.last.weight.detach().sum())


class Rate(Script):
    def after(self, _step: Step, _result: Any) -> None:
        self.trained.optimizers[0].param_groups[0]["lr"] *= 0.5


class Frozen(Script):
    """A copy that follows the model, as a teacher does."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.model.first.bias.requires_grad_(False)

    def after(self, _step: Step, _result: Any) -> None:
        with torch.no_grad():
            self.model.first.bias.mul_(0.5).add_(self.model.last.weight.sum())


class Weights(Script):
    def after(self, _step: Step, _result: Any) -> None:
        with torch.no_grad():
            self.model.last.weight.mul_(0.9)


class Thawed(Script):
    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.model.last.requires_grad_(False)

    def before(self, step: Step) -> None:
        if step.number == SPOILT + 1:
            self.model.last.requires_grad_(True)


class ThawedOnce(Thawed):
    """It does not do it again for a repeated step."""

    is_thawed = False

    def before(self, step: Step) -> None:
        if not self.is_thawed:
            super().before(step)
        self.is_thawed = step.number > SPOILT


class RateOnce(Script):
    """It does not do it again for a repeated step."""

    def before(self, step: Step) -> None:
        if step.number == SPOILT + 1 and not step.is_retry:
            self.trained.optimizers[0].param_groups[0]["lr"] *= 0.5


class ThawedGroup(Thawed):
    """It gives the thawed layer a group of its own."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        group = trained.optimizers[0].param_groups[0]
        group["params"] = group["params"][:-2]

    def before(self, step: Step) -> None:
        super().before(step)
        optimizer = self.trained.optimizers[0]
        if step.number == SPOILT + 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.model.last.parameters()), "lr": 0.01})


class Mode(Script):
    def before(self, step: Step) -> None:
        if step.number == SPOILT + 1:
            self.model.norm.eval()


SCRIPTS = (Registered, Buffer, Rate, RateOnce, Frozen, Weights, Thawed, ThawedOnce, ThawedGroup, Mode)


def trained_by(
    patch: pytest.MonkeyPatch, kind: Callable[[Trained], Script], *, confirm: str, spoil: int = -1, loses: bool = False
) -> tuple[dict[str, Any], Trained]:
    """Return the state, and what is registered, that such a script ends with."""
    trained = Trained(patch, on_non_finite="skip", decays=kind not in (Rate, RateOnce, ThawedGroup))
    script = kind(trained)
    inside: Any = {"inside": Closing(patch, trained, SPOILT, closes=True).lose} if loses else {}
    found: dict[str, Any] = trained.run(
        confirm=confirm, before=script.before, after=script.after, spoil=spoil, **inside
    )
    extras = {name: extra.state_dict() for name, extra in trained.job._training.extras.items() if name == "average"}
    return found | extras, trained


@pytest.mark.parametrize("spoilt", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_repeated_step_finds_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[Trained], Script],
    spoilt: bool,  # a case
) -> None:
    """Whether its gate was closed by a loss or by a gradient that is not finite."""
    spoil = SPOILT if spoilt else -1
    with monkeypatch.context() as patch:
        expected, _ = trained_by(patch, kind, confirm="now", spoil=spoil)
    found, _ = trained_by(monkeypatch, kind, confirm="late", spoil=spoil, loses=not spoilt)
    equal(found, expected)


class LateWeights(Weights):
    """It begins while step ``SPOILT`` waits."""

    def after(self, step: Step, result: Any) -> None:
        if step.number >= SPOILT:
            super().after(step, result)


def test_registered_objects_let_no_step_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of the loop may change them, and ranks that repeat a step have changed them more or less often."""
    _, trained = trained_by(monkeypatch, Registered, confirm="late")
    assert trained.kinds() == "NNNNN"


@pytest.mark.parametrize(("kind", "name"), [(Frozen, "first.bias"), (Weights, "last.weight")])
def test_no_step_waits_in_a_script_that_changes_parameters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Callable[[Trained], Script], name: str
) -> None:
    """The first one that has waited shows it, in one line."""
    _, trained = trained_by(monkeypatch, kind, confirm="late")
    assert trained.kinds() == "NLNNN"
    said = [record.getMessage() for record in caplog.records if "itself" in record.getMessage()]
    assert len(said) == 1
    assert f"after step 1, the script has changed {name} itself" in said[0]
    assert 'confirm="now"' in said[0]


def test_a_step_that_cannot_be_repeated_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script begins to change weights while a step waits that does not happen. No checkpoint gets these weights."""
    trained = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    with pytest.raises(heterotrain.UsageError, match=r"step 2 has to be repeated, and the script has changed last"):
        trained.run(after=LateWeights(trained).after, inside=Closing(monkeypatch, trained, SPOILT, closes=True).lose)
    assert not [*tmp_path.rglob("*")]


def test_a_script_that_leaves_such_a_step_keeps_no_checkpoint_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    Closing(monkeypatch, trained, SPOILT, closes=True)

    def leave(step: Step) -> None:
        if step.number == SPOILT + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained.run(after=LateWeights(trained).after, inside=leave)
    assert "no checkpoint is written: step 2 has to be repeated" in caplog.text


def test_parameters_that_forward_passes_change_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a rule, and steps wait."""

    def follow(model: Any, _inputs: Any) -> None:
        with torch.no_grad():
            model.first.bias.mul_(0.9)

    class Followed(Script):
        def __init__(self, trained: Trained) -> None:
            super().__init__(trained)
            self.model.first.bias.requires_grad_(False)
            trained.job.buffers("first.bias", "leader")
            self.model.register_forward_pre_hook(follow)

    with monkeypatch.context() as patch:
        expected, _ = trained_by(patch, Followed, confirm="now")
    found, trained = trained_by(monkeypatch, Followed, confirm="late", loses=True)
    equal(found, expected)
    assert trained.kinds()[1] == "L"


def test_parameters_without_a_count_of_changes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts no changes of tensors that were made in inference mode."""
    with torch.inference_mode():
        fixed = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    trained = Trained(monkeypatch)
    trained.model.fixed = fixed
    trained.run()
    assert trained.kinds() == "NLLLN"


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("kind", [RateOnce, ThawedGroup])
def test_schedulers_and_scripts_change_rates_in_order(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: Callable[[Trained], Script],
    closes: bool,  # a case
) -> None:
    """A step that waits has its rate from its scheduler later. The checkpoint has nothing of the change."""
    trained = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    script = kind(trained)
    inside: Any = {"inside": Closing(monkeypatch, trained, SPOILT, closes=closes).lose} if closes else {}
    with pytest.raises(heterotrain.UsageError, match=r"while step 2 waits, and schedulers change them"):
        trained.run(before=script.before, **inside)
    again = Trained(monkeypatch, checkpoint_uri=str(tmp_path))
    script = kind(again)
    with monkeypatch.context() as patch:
        expected = Trained(patch)
        equal(again.run(before=script.before, confirm="now"), expected.run(before=kind(expected).before, confirm="now"))
    assert again.order[0] == f"forward {3 - closes}"


def test_a_script_that_looks_first_changes_rates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before is committed then, and the scheduler has set its rate."""

    def halve(step: Step, _result: Any, trained: Trained) -> None:
        if step.number == SPOILT and step.committed:
            trained.optimizers[0].param_groups[0]["lr"] *= 0.5

    found = []
    for confirm in ("now", "late"):
        with monkeypatch.context() as patch:
            trained = Trained(patch)
            found.append(trained.run(confirm=confirm, after=lambda *of, trained=trained: halve(*of, trained)))  # type: ignore[misc]  # a default argument binds the loop's variable
    equal(*found)
    assert trained.kinds() == "NLELN"
