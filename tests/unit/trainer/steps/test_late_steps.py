"""Steps that the next vote confirms, with a gate on the CPU: what confirms them earlier, and closed gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import heterotrain
import pytest
import torch
from heterotrain.data.order import permutation
from heterotrain.errors import NonFinite, PeerLost, RepeatStep
from heterotrain.exchange import gate as gates
from heterotrain.exchange.gate import Gate
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.membership.fixed import Fixed
from heterotrain.network.control import Agreed, StepDecision
from heterotrain.numerics.precision import MixedPrecision
from heterotrain.steps import agreement, observer
from heterotrain.steps.columns import CHECKPOINT, CheckpointVote
from heterotrain.steps.departure import LEAVING, Leaving
from heterotrain.steps.late import Haste
from heterotrain.steps.states import StepState
from heterotrain.steps.step import Step
from heterotrain.steps.step_records import StepRecords

SAMPLES, BATCH, RATE = 40, 8, 0.05
X = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) ** 2)


class Net(torch.nn.Module):
    """A model with statistics of the batch, and a buffer of its own."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.mul_(0.5).add_(x.mean().detach())
        y: torch.Tensor = self.last(self.norm(self.first(x)).relu()) + self.count
        return y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, fused=True)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def batches(epochs: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the number and samples of each step."""
    for epoch in range(epochs):
        order = torch.as_tensor(permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True))
        for number, chosen in enumerate(order.split(BATCH)):
            yield epoch * (SAMPLES // BATCH) + number, DATA.tensors[0][chosen], DATA.tensors[1][chosen]


def plain(*, epochs: int = 1, steps: int = SAMPLES, skipped: int = -1) -> dict[str, torch.Tensor]:
    """Return what plain PyTorch makes of the same samples, where step ``skipped`` leaves no trace but its rate's."""
    model = Net()
    optimizer = sgd(model.parameters())
    schedule = decay(optimizer)
    for number, x, y in islice(batches(epochs), steps):
        if number != skipped:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


class Trained:
    """A job with a gate, and the order in which its steps are computed, voted on, applied and committed."""

    def __init__(self, patch: pytest.MonkeyPatch, *, measured: tuple[int, ...] = (), **settings: Any) -> None:
        patch.setattr(gates, "runs_behind", lambda _flats: True)
        patch.setattr(observer, "is_measured", lambda number, _every: number in measured)
        self.order: list[str] = []
        self.agreed: dict[int, dict[Any, Any]] = {}
        """What the ranks agree on in some steps."""
        committed, exchange, order = StepRecords.committed, agreement.exchange_votes, self.order

        def committing(self: StepRecords, step: Any, *arguments: Any) -> None:
            order.append(f"commit {step.number}")
            committed(self, step, *arguments)

        def voting(ballot: Any, about: Any, **own: Any) -> Any:
            number = about.step.number
            order.append(f"vote {number}" if own["ok"] else f"against {number}")
            decision, held = exchange(ballot, about, **own)
            changed = Agreed({**decision.agreed, **self.agreed.get(number, {})})
            values = (decision.committed, decision.weights, decision.weight, decision.loss, decision.non_finite)
            return StepDecision(*values, changed, decision.apart), held

        patch.setattr(StepRecords, "committed", committing)
        patch.setattr(agreement, "exchange_votes", voting)
        self.job = heterotrain.init(**({"epochs": 1, "batch_samples": BATCH} | settings))
        self.model: Any = self.job.wrap(Net())
        self.optimizers = [self.job.optimizer(sgd(self.model.parameters()))]
        self.schedule = self.job.scheduler(decay(self.optimizers[0]))
        self.results: list[heterotrain.StepResult] = []

    def run(
        self,
        *,
        confirm: str = "late",
        before: Callable[[Step], None] = lambda _step: None,
        inside: Callable[[Step], None] = lambda _step: None,
        after: Callable[[Step, heterotrain.StepResult], object] = lambda _step, _result: None,
        spoil: int = -1,
        more: int = -1,
        data: Any = DATA,
        **limits: float,
    ) -> dict[str, torch.Tensor]:
        """Train; the script does something ``before`` and ``inside`` the micro-batch, and ``after`` the update.

        The gradient of step ``spoil`` is not finite, and step ``more`` has two passes. Return the state.
        """
        for step in self.job.steps(data, confirm=confirm):
            before(step)
            with step:
                for again in (True, False) if step.number == more else (False,):
                    for x, y in step.micro_batches(more=again):
                        output = self.model(x)
                        self.order.append(f"forward {step.number}")
                        inside(step)
                        if step.number == spoil:
                            output.register_hook(lambda gradient: gradient * float("inf"))
                        step.backward(((output - y) ** 2).mean())
                result = step.apply(*self.optimizers, **limits)
                self.order.append(f"applied {step.number}")
                self.results.append(result)
                after(step, result)
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def kinds(self) -> str:
        """Return a letter for each committed step: in ``apply`` (N), before the next forward pass (E), or later (L)."""
        found = ""
        for number in range(self.job._training.progress.steps):
            at = self.order.index(f"commit {number}")
            applied, following = self.order.index(f"applied {number}"), f"forward {number + 1}"
            forward = self.order.index(following) if following in self.order else len(self.order)
            found += "N" if at < applied else "E" if at < forward else "L"
        return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail unless two states are the same to a relative 1e-10."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


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


class Closing:
    """Closes the gate of one step, as the flag does, and lets the next step lose a peer in some place."""

    def __init__(self, patch: pytest.MonkeyPatch, trained: Trained, number: int, *, closes: bool) -> None:
        self.trained, self.number = trained, number
        self.closes = closes
        begin, closing, form = Gate.__init__, self, Fixed.form
        patch.setattr(Fixed, "form", lambda membership, _previous: form(membership, None))

        def init(gate: Gate, flats: Any, flag: Any) -> None:
            begin(gate, flats, flag)
            votes = [order for order in closing.trained.order if order.startswith("vote")]
            if closing.closes and votes[-1] == f"vote {number}":
                closing.closes = False
                gate.closed.fill_(1.0)
                gate._copy = HostCopy(torch.tensor([1.0, float(gate.squared)], dtype=torch.float64))

        patch.setattr(Gate, "__init__", init)
        self.left = [PeerLost("gone")]

    def lose(self, step: Step, *_arguments: Any) -> None:
        if step.number == self.number + 1 and self.left:
            raise self.left.pop()


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
