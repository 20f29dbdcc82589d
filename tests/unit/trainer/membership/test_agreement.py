"""Ranks with parts of a model agree on the newest state: threads of one process, over real sockets."""

from __future__ import annotations

import gc
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from heterotrain.data.progress import Progress
from heterotrain.errors import PeerLost, StateLost, UsageError
from heterotrain.membership.agreement import agree_on_state
from heterotrain.network.group import Group
from heterotrain.network.link_speeds import LinkSpeeds
from heterotrain.network.mesh.mesh import Mesh
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.numerics.method import Numerics
from heterotrain.parts.pieces.sums import PieceSums
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.planned.part import PlannedPart
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain.state.layout import Shapes
from heterotrain.state.ranges import TensorRange
from heterotrain.state.snapshot import Snapshot
from heterotrain.state.training import TrainState
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.plan import Layout, LayoutKind, Member, Plan, Rank
from support.divided_models import (
    Elements,
    ElementsLayout,
    assert_state_is,
    begin,
    full,
    layouts_of,
    training_of,
    whole_values,
)
from support.repeat import times
from support.waiting import UNLIMITED_S

STEPS = 3
CPU = torch.device("cpu")


def a_part(
    model: CuttableModel, training: TrainState, measure: Callable[[Any], float | None] = lambda _example: None
) -> PlannedPart:
    """Return the part of a rank that has no place in a plan yet."""
    sums = PieceSums(training, Numerics(TrainingConfig(), CPU, training))
    return PlannedPart(model, training, sums, CPU, speeds=LinkSpeeds(), measure=measure)


@contextmanager
def groups(ranks: int) -> Iterator[list[Group]]:
    """Connect ranks."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for one, other in itertools.combinations(range(ranks), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    found = []
    for rank in range(ranks):
        group = Group(
            rank=rank, world_size=ranks, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset())
        )
        group._mesh = Mesh(peers[rank], rank=rank, limit_s=UNLIMITED_S)
        found.append(group)
    try:
        yield found
    finally:
        for group in found:
            assert group._mesh is not None
            group._mesh.close()


@dataclass
class Folder:
    """Checkpoints of one state, for ranks of any layout."""

    saved: TrainState | None = None
    loads: list[int] = field(default_factory=list)

    def best(self) -> tuple[int, int]:
        return (-1, -1) if self.saved is None else (1, self.saved.progress.steps)

    def load_into(self, training: TrainState) -> bool:
        if self.saved is None:
            return False
        self.loads.append(self.saved.progress.steps)
        training.restore(self.saved.capture())
        return True


def agree(
    trainings: list[TrainState], folder: Folder | None = None, *, places: Sequence[Callable[[], None]] = ()
) -> None:
    """Let all ranks agree; ``places`` gives each one its part of the model. A rank that fails ends its connections."""

    def ending(group: Group, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException:
            assert group._mesh is not None
            group._mesh.cut()
            raise

    ranks = len(trainings)
    with groups(ranks) as connected, ThreadPoolExecutor(ranks) as pool:
        calls: list[Callable[[], Any]] = [
            partial(agree_on_state, group, training, folder or Folder(), place=place)
            for group, training, place in zip(connected, trainings, places or [lambda: None] * ranks, strict=True)
        ]
        for future in [pool.submit(ending, *each) for each in zip(connected, calls, strict=True)]:
            future.result()


@pytest.mark.parametrize("seed", range(times(gate=4, every=120)))
def test_state_moves_between_random_layouts(seed: int) -> None:
    """Some ranks have the newest state under old layouts, others have an older one or none: all end with their part."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    donors = int(rng.integers(1, ranks + 1))
    before, after = layouts_of(rng, donors), layouts_of(rng, ranks)
    trainings = [training_of(holding, seed=seed, steps=STEPS) for holding in before]
    trainings += [
        training_of(holding, seed=seed + 1, steps=rank % STEPS) for rank, holding in enumerate(after[donors:])
    ]
    for training, holding in zip(trainings, after, strict=True):
        if rng.random() < 0.8 or training.layout.holding != holding:
            begin(training, Elements(holding, whole_values(seed + 2)))
    agree(trainings)
    expected = training_of(full(), seed=seed, steps=STEPS)
    for training in trainings:
        assert_state_is(training, expected)
        assert training.earlier is None


def test_an_end_that_one_rank_knows_of_is_the_end_for_all() -> None:
    """A rank that applied the last step late has not heard from its script; a rank behind never decides it."""
    trainings = [training_of(full(), seed=1, steps=steps) for steps in (STEPS, STEPS - 1, STEPS, STEPS)]
    trainings[1].progress = replace(trainings[1].progress, stopped=True)
    agree(trainings)
    assert not any(training.progress.stopped for training in trainings)
    trainings[2].progress = replace(trainings[2].progress, stopped=True)
    agree(trainings)
    assert all(training.progress.stopped for training in trainings)


def test_hooks_that_some_ranks_of_a_divided_model_have_not_called_are_called_again() -> None:
    """Those that have go back to before them, unless weights have changed; where all is on one rank, that is newer."""
    half = {name: TensorRange(name, 0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: TensorRange(name, extent.stop // 2, extent.stop) for name, extent in full().items()}
    expected, at = training_of(full(), seed=1, steps=STEPS), Progress(steps=STEPS)

    def ranks(*holdings: Any) -> list[TrainState]:
        found = [training_of(holding, seed=1, steps=STEPS) for holding in holdings]
        found[0].before_hooks = (at, Snapshot(found[0]))
        found[0].extras["average"].values += 5  # type: ignore[attr-defined]  # the test's own object
        found[0].progress = replace(at, evaluated=1)
        return found

    trainings, folder = ranks(half, rest), Folder()
    agree(trainings, folder)
    for training in trainings:
        assert (training.progress, training.before_hooks) == (at, None)
        assert_state_is(training, expected)
    changed = ranks(half, rest)
    with torch.no_grad():
        next(parameter for _, parameter in changed[0].layout.named_parameters()).add_(1.0)
    with pytest.raises(StateLost):
        agree(changed)
    whole = training_of(full(), seed=1, steps=STEPS)
    whole.progress = replace(at, evaluated=1)
    trainings = [*ranks(half, rest), whole]
    agree(trainings)
    assert [training.progress.evaluated for training in trainings] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(times(gate=4, every=120)))
def test_no_part_is_lost_when_a_transfer_breaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer breaks between two batches, on some ranks one message later than on others."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 5))
    donors = int(rng.integers(1, ranks + 1))
    trainings = [training_of(holding, seed=seed, steps=STEPS) for holding in layouts_of(rng, donors)]
    trainings += [training_of({}, seed=seed + 1) for _ in range(donors, ranks)]
    for breaks in (True, True, False):
        for training, holding in zip(trainings, layouts_of(rng, ranks), strict=True):
            begin(training, Elements(holding, whole_values(seed + 2)))
        with monkeypatch.context() as patch, suppress(PeerLost) if breaks else nullcontext():
            if breaks:
                break_transfers(patch, rng.integers(0, 4, ranks).tolist())
            agree(trainings)
    expected = training_of(full(), seed=seed, steps=STEPS)
    for training in trainings:
        assert_state_is(training, expected)
        assert training.earlier is None


@pytest.fixture
def own_objects() -> Iterator[None]:
    """Let the collector know of the test's own objects only: the tests before it may have left millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("own_objects")
def test_two_stages_change_places_in_the_room_of_one_and_a_few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks exchange all of their units; the bytes of weights and moments are counted while they move."""
    units, width = 8, 100
    unit_bytes = 3 * 4 * width**2
    monkeypatch.setattr("heterotrain.state.moves.BATCH_BYTES", 1)

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(units)))

    models = [CuttableModel(built(build), None, InitialValues(seed=1, device=torch.device("cpu"))) for _ in range(2)]
    trainings = [TrainState(order="as given") for _ in models]
    members = [a_part(*both) for both in zip(models, trainings, strict=True)]
    for model, member, training in zip(models, members, trainings, strict=True):
        model.look(torch.zeros(1, width))
        training.optimizers = [torch.optim.Adam(model.model.parameters())]
        member.follow(training.optimizers[0])

    def swap(stages: tuple[int, int]) -> None:
        places = [lambda m=member, s=stage: m.place(PLAN, s) for member, stage in zip(members, stages, strict=True)]
        agree(trainings, places=places)

    swap((0, 1))
    expected = {}
    for training in trainings:
        for name, parameter in training.layout.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            expected[name] = parameter
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        training.progress = Progress(steps=1)
    expected = {name: parameter.detach().clone() for name, parameter in expected.items()}
    seen, send_receive = [], Group.send_receive

    def counted(group: Group, *arguments: Any, **named: Any) -> None:
        seen.append(live_bytes(width))
        send_receive(group, *arguments, **named)

    del parameter
    own = live_bytes(width)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "send_receive", counted)
        swap((1, 0))
    assert len(seen) > units
    assert max(seen) <= own + 4 * unit_bytes, (max(seen) - own) / unit_bytes
    assert live_bytes(width) == own
    for training in trainings:
        for name, parameter in training.layout.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=0)
        assert len(training.optimizers[0].state) == units


def live_bytes(width: int) -> int:
    """Return the bytes of all matrices of a width in this process; shared ones count once."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in {torch.Tensor, torch.nn.Parameter} and thing.shape == (width, width) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


PLAN = Plan(
    job_uid="job", generation=1, revision=1, global_batch_samples=1,
    members=(Member(index=0, pool="p", share_samples=1, layout=Layout(kind=LayoutKind.PIPELINE, cuts=(4,))),),
    ranks=tuple(
        Rank(
            rank=stage, member=0, worker=f"w{stage}", worker_uid=f"w{stage}", address="127.0.0.1",
            peer_port=stage + 1, on_demand=True, stage=stage,
        )
        for stage in range(2)
    ),
)  # fmt: skip


def break_transfers(patch: pytest.MonkeyPatch, after: list[int]) -> None:
    """Move each parameter by itself; a rank is lost after its n-th wait for the others."""
    patch.setattr("heterotrain.state.moves.BATCH_BYTES", 1)
    left, gather_now = dict(enumerate(after)), Group.gather_now

    def gather(group: Group, values: Any, *purpose: Any) -> Any:
        found = gather_now(group, values, *purpose)
        if list(values) == [0.0]:
            left[group.rank] -= 1
            if left[group.rank] < 0:
                group.cut("the test breaks the transfer")
                raise PeerLost("the test breaks the transfer")
        return found

    patch.setattr(Group, "gather_now", gather)


def test_a_lost_part_is_read_from_the_checkpoint() -> None:
    """Nobody has the second half at any step: every rank reads its part of the checkpoint."""
    half = {name: TensorRange(name, 0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: TensorRange(name, extent.stop // 2, extent.stop) for name, extent in full().items()}
    trainings = [training_of(half, seed=1, steps=STEPS), training_of(rest, seed=2)]
    saved = training_of(full(), seed=1, steps=STEPS - 1)
    folder = Folder(saved)
    agree(trainings, folder)
    assert folder.loads == [STEPS - 1] * 2
    for training in trainings:
        assert_state_is(training, saved)
    with pytest.raises(
        StateLost,
        match=r"state of step 3 together, and there is no checkpoint yet, so training has to begin again: set",
    ):
        agree([training_of(half, seed=1, steps=STEPS), training_of(rest, seed=2)])


def test_a_part_of_the_initial_weights_that_was_lost_is_drawn_again() -> None:
    """A stage is lost before the first step and checkpoint: the other rank takes its place, with initial values."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))

    def member() -> tuple[TrainState, PlannedPart]:
        cuttable = CuttableModel(built(build), None, InitialValues(seed=1, device=torch.device("cpu")))
        cuttable.look(torch.zeros(1, 4))
        training = TrainState(order="as given")
        training.optimizers = [torch.optim.Adam(cuttable.model.parameters())]
        found = a_part(cuttable, training)
        found.follow(training.optimizers[0])
        return training, found

    (first, first_member), (lost, lost_member), (new, new_member) = member(), member(), member()
    agree([first, lost], places=[partial(first_member.place, PLAN, 0), partial(lost_member.place, PLAN, 1)])
    agree([new, first], places=[partial(new_member.place, PLAN, 0), partial(first_member.place, PLAN, 1)])
    whole = units_of(built(build), None)
    InitialValues(seed=1, device=torch.device("cpu")).fill(whole)
    expected = dict(whole.model.named_parameters())
    for training in (new, first):
        assert training.has_state
        for name, parameter in training.layout.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)


class Wider(ElementsLayout):
    """Elements of a model with larger parameters."""

    @property
    def shapes(self) -> Shapes:
        return {name: (*shape, 2) for name, shape in super().shapes.items()}


def test_ranks_with_parts_of_different_models_are_refused() -> None:
    """A function that does not build the same model on every rank: each of them says so."""
    half = {name: TensorRange(name, 0, extent.stop // 2) for name, extent in full().items()}
    trainings = [training_of(half, seed=1), training_of(half, seed=1)]
    trainings[1].own_layout = Wider(Elements(half, whole_values(1)))
    with pytest.raises(UsageError, match="rank 1 has another model than rank 0: build the same model on every rank"):
        agree(trainings)


def test_parts_begin_together() -> None:
    """Nobody has a state: the first ranks that are whole together begin, and the others get their values."""
    half = {name: TensorRange(name, 0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: TensorRange(name, extent.stop // 2, extent.stop) for name, extent in full().items()}
    trainings = [training_of(part, seed=seed) for part, seed in ((half, 1), (rest, 1), (full(), 9), (rest, 8))]
    agree(trainings)
    expected = training_of(full(), seed=1)
    for training in trainings:
        assert_state_is(training, expected)
