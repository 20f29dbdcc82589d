"""State that changes in forward is that of one process with the whole batch, for any division of the batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from heterotrain import UsageError
from heterotrain.forward_state.state import ForwardState
from support import changing_layers as layers
from support.thread_peers import ThreadPeers, on_ranks
from torch import nn

Division = Sequence[Sequence[int]]
"""Sizes of the micro-batches of each rank."""
DIVISIONS: dict[str, list[Division]] = {
    "one micro-batch": [[[12]]] * 3,
    "micro-batches": [[[5, 5, 2]], [[12]], [[1, 11]]],
    "uneven ranks, one without samples": [[[7], [], [3, 2]], [[], [12], []], [[4], [4], [4]]],
    "the first rank has none": [[[], [5, 1], [6]]] * 3,
    "a step without samples": [[[7], [], [5]], [[], [], []], [[4], [4], [4]]],
}
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "observer": (layers.moving_observer, lambda _: None),
    "observer of channels": (layers.channel_observer, lambda _: None),
    "fake quantizer": (layers.fake_quantizer, lambda _: None),
    "spectral norm": (layers.spectral, lambda _: None),
    "older spectral norm": (layers.old_spectral, lambda _: None),
    "codebook": (layers.Codebook, layers.Codebook.declare),
    "momentum encoder": (layers.MomentumEncoder, lambda _: None),
    "sums and means": (layers.Tally, layers.Tally.declare),
}


class Rules:
    """Takes the rules that a script would give to its job."""

    def __init__(self, state: ForwardState) -> None:
        self._state = state

    def buffers(self, name: str, rule: Any, *, decay: float = 1.0) -> None:
        """Pass a rule on."""
        self._state.declare(name, rule, decay=decay)


def a_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(make(), nn.Linear(layers.FEATURES, 1)).double()


def data(step: int) -> torch.Tensor:
    return torch.randn(12, layers.FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def learn(model: nn.Module, step: int) -> None:
    """Change weights alike on all ranks, as an optimizer would."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.full_like(parameter, 0.01 * (step + 1)))


def trained(
    model: nn.Module, divisions: Sequence[Division], declare: Callable[[Any], None] = lambda _: None
) -> list[dict[str, torch.Tensor]]:
    """Run the steps on as many threads as there are ranks; return each rank's state."""

    def work(peers: ThreadPeers) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        state = ForwardState()
        state.use(own)
        declare(Rules(_Prefixed(state)))
        group: Any = None if peers.world_size == 1 else peers
        state.form(group)
        for step, division in enumerate(divisions):
            counts = [sum(sizes) for sizes in division]
            begin = sum(counts[: peers.rank])
            state.copies.renew([*own.named_buffers(), *state.frozen()])
            state.begin(leads=begin == 0 and counts[peers.rank] > 0)
            own(torch.full((1, layers.FEATURES), 100.0, dtype=torch.float64))
            state.take(0)  # a sample with weight zero
            for part in data(step)[begin : begin + counts[peers.rank]].split(list(division[peers.rank]) or [0]):
                if len(part):
                    own(part)
                    state.take(len(part))
            if any(row[0] for row in peers.gather_now([float(state.has_news)])):
                state.agree(group)
            state.start(group)
            state.wait(group)
            state.finish()
            learn(own, step)
        return {name: value.detach().clone() for name, value in own.state_dict().items()}

    return on_ranks(len(divisions[0]), work)


class _Prefixed:
    """Names tensors of the first layer of ``a_model``."""

    def __init__(self, state: ForwardState) -> None:
        self._state = state

    def declare(self, name: str, rule: Any, *, decay: float) -> None:
        self._state.declare(f"0.{name}", rule, decay=decay)


def plain(model: nn.Module, divisions: Sequence[Division]) -> dict[str, torch.Tensor]:
    """Return the state after one forward pass of the whole batch in each step that has samples."""
    for step, division in enumerate(divisions):
        if any(sizes for sizes in division):
            model(data(step))
        learn(model, step)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_that_of_the_whole_batch(kind: str, division: str) -> None:
    """On each rank, to the last bit among ranks; also on ranks without samples, and after a sample without weight."""
    make, declare = KINDS[kind]
    model = a_model(make)
    found = trained(model, DIVISIONS[division], declare)
    expected = plain(model, DIVISIONS[division])
    for own in found:
        for name, value in expected.items():
            torch.testing.assert_close(
                own[name], value, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )
            assert torch.equal(own[name], found[0][name]), name


def test_what_no_rule_covers_is_the_first_micro_batch_everywhere_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A queue and its pointer stay consistent; one rank names them, whichever rank has seen the change."""
    model = a_model(layers.Queue)
    with caplog.at_level(logging.WARNING):
        found = trained(model, [[[], [5, 1], [6]]] * 3)
    for step in range(3):
        model(data(step)[:5])
    for own in found:
        assert torch.equal(own["0.rows"], model[0].rows)
        assert own["0.pointer"] == 15
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("0.pointer of Queue, 0.rows of Queue changed in a forward pass")
    assert "job.buffers(name, rule)" in said


def test_one_micro_batch_of_one_rank_needs_no_rule(caplog: pytest.LogCaptureFixture) -> None:
    """The state is that of plain torch, and nothing is said."""
    model = a_model(layers.Queue)
    with caplog.at_level(logging.WARNING):
        (found,) = trained(model, [[[12]]] * 3)
    assert torch.equal(found["0.rows"], torch.as_tensor(plain(model, [[[12]]] * 3)["0.rows"]))
    assert not caplog.records


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["a buffer", "a network that was trained"])
def test_what_a_script_changes_before_a_pass_is_no_change_of_the_pass(
    kind: str, *, large: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A temperature that is set inside a step; a discriminator that is frozen again after its own pass."""
    model, state, size = a_model(layers.Queue), ForwardState(), 5_000 if large else 3
    if kind == "a buffer":
        model.register_buffer("own", torch.zeros(size))
    else:
        model.register_parameter("own", nn.Parameter(torch.zeros(size), requires_grad=False))
        model.register_parameter("other", nn.Parameter(torch.zeros(size)))
    own: Any = model.get_parameter("own") if kind != "a buffer" else model.get_buffer("own")
    state.use(model)
    state.copies.renew([*model.named_buffers(), *state.frozen()])
    with torch.no_grad():
        own.add_(1.0)
    state.find()
    state.begin()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(data(0))
            state.take(6)
            assert torch.equal(own, torch.ones(size)), "the next micro-batch sees what the script has set"
        assert state.has_news
        state.agree(None)
        state.start(None)
        state.finish()
    assert torch.equal(own, torch.ones(size))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("0.pointer of Queue, 0.rows of Queue changed in a forward pass")


def test_a_rank_keeps_what_is_its_own() -> None:
    """It is not put back between micro-batches, and not among the buffers that ranks compare."""
    model = a_model(layers.Tally)
    state = ForwardState()
    state.use(model)
    state.declare("0.*", "own")
    state.begin()
    for part in data(0).split(6):
        model(part)
        state.take(6)
    state.finish()
    assert model[0].seen == 12
    assert not [name for name, _ in state.named()]


def test_a_pass_that_does_not_count_leaves_no_trace() -> None:
    """Without ``finish``, as in a step that is repeated or skipped, everything is as before the first micro-batch."""
    model = a_model(layers.Everything)[0]
    before = copy.deepcopy(model.state_dict())
    state = ForwardState()
    state.use(model)
    layers.Everything.declare(Rules(state))
    state.copies.renew([*model.named_buffers(), *state.frozen()])
    state.begin()
    model(data(0))
    state.take(12)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_large_frozen_parameters_are_not_copied_in_search_of_changes() -> None:
    """A change of them is refused with the remedy, which then is exact."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 64).requires_grad_(False)
            self.adapter = nn.Linear(layers.FEATURES, layers.FEATURES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.frozen.weight.mul_(0.5)
            return self.adapter(x)

    def run(declares: bool) -> nn.Module:
        model = Adapter().double()
        state = ForwardState()
        state.use(model)
        if declares:
            state.declare("frozen.*", "leader")
        assert len(list(state.frozen())) == (2 if declares else 0)
        state.begin()
        for _ in range(2):
            model(data(0))
            state.take(6)
        state.start(None)
        state.finish()
        return model

    with pytest.raises(UsageError, match=r"frozen parameter 'frozen.weight' changes.*job.buffers\('frozen.weight'"):
        run(declares=False)
    torch.manual_seed(0)
    before = Adapter().double().frozen.weight
    torch.manual_seed(0)
    assert torch.equal(run(declares=True).frozen.weight, before * 0.5)


def test_ranks_with_other_rules_are_told() -> None:
    """Before the first step."""

    def work(peers: ThreadPeers) -> None:
        state = ForwardState()
        state.use(a_model(layers.Tally))
        state.declare("0.seen", "sum" if peers.rank else "max")
        state.form(peers)  # type: ignore[arg-type]  # stands for a formation

    with pytest.raises(UsageError, match=r"same calls of job\.buffers on every rank"):
        on_ranks(2, work)


@pytest.mark.parametrize(
    ("name", "rule", "decay", "sentence"),
    [
        (
            "sen",
            "sum",
            1.0,
            r"no persistent buffer and no frozen parameter of the model is named 'sen': it has 0\.seen",
        ),
        ("0.seen", "average", 1.0, r"'average' is unknown: choose one of mean, sum"),
        ("0.seen", "sum", 2.0, r"decay must be a number from 0 to 1, not 2\.0"),
        ("0.seen", "mean", 0.5, r"decay= belongs to the rule 'sum'"),
        ("0.seen", "derived", 1.0, r"give the function"),
    ],
)
def test_mistakes_are_said_at_once(name: str, rule: str, decay: float, sentence: str) -> None:
    """With what to do."""
    state = ForwardState()
    state.use(a_model(layers.Tally))
    with pytest.raises(UsageError, match=sentence):
        state.declare(name, rule, decay=decay)


class Keeping(nn.Linear):
    """Changes something outside its state in each forward pass."""

    kind, calls, mean, table = "", 0, None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "count":
            self.calls += 1
        elif self.kind == "mean":
            self.mean = 0.9 * (0.0 if self.mean is None else self.mean) + x.detach().mean(0)
        elif self.kind == "buffer":
            self.kept += x.detach().mean(0)
        elif self.kind == "again" or (self.kind == "cache" and self.table is None):
            self.table = torch.ones(3)
        output = super().forward(x)
        self.penalty = output.square().mean() if self.kind == "penalty" else None
        return output


@pytest.mark.parametrize(("kind", "name"), [("count", "0.calls"), ("mean", "0.mean"), ("buffer", "0.kept")])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_state_that_no_checkpoint_has_is_reported_once_where_it_matters(
    kind: str, name: str, micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    passes(kind, micro_batches)
    said = [
        record.message for record in caplog.records if "neither checkpoints nor joining ranks get it" in record.message
    ]
    assert len(said) == int(micro_batches > 1)
    assert all(each.startswith(f"{name} changed in forward passes") for each in said)


@pytest.mark.parametrize("kind", ["none", "cache", "again", "penalty"])
def test_caches_and_terms_of_losses_are_no_state(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    passes(kind, 2)
    assert not caplog.records


def passes(kind: str, micro_batches: int) -> None:
    """Make some passes with a model that keeps something."""
    model = nn.Sequential(Keeping(3, 1))
    model[0].kind = kind
    model[0].register_buffer("kept", torch.zeros(3), persistent=False)
    state = ForwardState()
    state.use(model)
    for _ in range(5):
        state.begin()
        for _ in range(micro_batches):
            model(torch.rand(4, 3)).sum().backward()
            state.take(4)
        state.finish()
