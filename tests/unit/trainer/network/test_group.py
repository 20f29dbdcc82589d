"""A formation's connections, with a stand-in for NCCL, which needs a GPU for each rank."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import PeerLost, UsageError
from heterotrain.exchange.islands.sums import IslandSums
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.network.sums import FlatSums, owners_to_connect
from heterotrain.state.ranges import TensorRange, pieces_of
from heterotrain_core.contract.owners import MOST_OWNER_GROUPS, owner_groups
from heterotrain_core.contract.plan import Layout, LayoutKind
from support.repeat import times
from support.waiting import wait_until


class Communicator:
    """Counts what is asked of it, and notes whether the flag of its formation was up."""

    def __init__(self, *, fails: bool = False) -> None:
        self.aborts = 0
        self.flag: AbortFlag | None = None
        self.was_up: list[bool] = []
        self._fails = fails

    def abort(self) -> None:
        """Count; a communicator that does not exist yet may refuse."""
        self.aborts += 1
        self.was_up += [] if self.flag is None else [self.flag.is_up]
        if self._fails:
            raise RuntimeError("no communicator")


def group_with(communicator: Any, *, backend: str) -> Group:
    """Return a group whose gradients use this communicator."""
    group = Group(rank=0, world_size=2, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    group._sums = FlatSums(communicator, is_nccl=backend == "nccl", is_over=group.is_over)
    return group


def in_an_island(communicator: Any) -> Group:
    """Return a group of a rank whose island uses this communicator."""
    group = group_with(None, backend="gloo")
    group._sums = IslandSums(communicator, None, is_nccl=True, is_over=group.is_over)
    return group


@pytest.mark.parametrize("fails", [False, True])
def test_a_cut_aborts_nccl_once(fails: bool) -> None:
    """NCCL's operations end in no other way; whatever abort does, the group is cut."""
    communicator = Communicator(fails=fails)
    group = group_with(communicator, backend="nccl")
    group.cut("a peer is lost")
    group.cut("again")
    for thread in group._aborts:
        thread.join()
    assert communicator.aborts == 1
    with pytest.raises(PeerLost, match="a peer is lost"):
        group.check()


@pytest.mark.parametrize("what", ["the formation", "the member", "the end of the formation"])
def test_the_flag_is_up_before_any_communicator_is_aborted(what: str) -> None:
    """A device that finds it down behind a sum then has the whole sum."""
    communicator = Communicator()
    group = group_with(communicator, backend="nccl")
    communicator.flag = group.flag
    assert float(group.flag.on(torch.device("cpu"))) == 0.0
    if what == "the formation":
        group.cut("a peer is lost")
    elif what == "the member":
        member = MemberGroup(rank=0, world_size=2)
        group.attach(member, "", "nccl")
        member._is_nccl, member._backend, member._cut = True, communicator, ""
        member.cut("a rank of the member left the pass")
        with pytest.raises(PeerLost, match="inside this rank's member"):
            group.check_whole()
    else:
        group._cut = "a peer is lost"
        group.close()
    wait_until(lambda: communicator.was_up == [True], "an abort behind the flag", timeout_s=60, evidence=lambda: "")
    assert float(group.flag.on(torch.device("cpu"))) == 1.0


def test_a_cut_does_not_wait_for_an_abort_that_hangs() -> None:
    """The thread that cuts also answers the peers' heartbeats: this rank would look lost itself."""
    let_go = threading.Event()
    group = group_with(SimpleNamespace(abort=let_go.wait), backend="nccl")
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(group.cut, "a peer is lost").result()
        finally:
            let_go.set()
    assert group.is_cut


def test_a_cut_leaves_gloo_to_its_connections() -> None:
    """Gloo cannot be aborted; its sockets are shut down instead."""
    communicator = Communicator()
    group_with(communicator, backend="gloo").cut("a peer is lost")
    assert communicator.aborts == 0


class Waiting(Communicator):
    """Waits for a lost rank while it connects, as inside NCCL: nothing wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.is_released = threading.Event(), threading.Event()

    def eager_connect_single_device(self, _device: torch.device) -> None:
        """Wait."""
        self.is_asked.set()
        self.is_released.wait()


def test_a_rank_that_is_lost_while_nccl_connects_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others leave at once, although the call inside NCCL goes on."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    communicator = Waiting()
    group = group_with(communicator, backend="nccl")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(group._join, [communicator], frozenset())
        communicator.is_asked.wait()
        assert group.waiting is not None, "the hang watch has to see it"
        assert group.waiting.what == "the connections of NCCL"
        group.cut("a peer is lost")
        with pytest.raises(PeerLost, match="a peer is lost"):
            joining.result()
    assert not communicator.is_released.is_set()
    communicator.is_released.set()


def waits_for_device(group: Group, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether ``finish_device`` waits for a stand-in of the accelerator."""
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    group.finish_device()
    return bool(waits)


def test_the_host_waits_for_the_device_where_nccl_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted operation of NCCL looks finished; those of gloo have ended when they were waited for."""
    assert waits_for_device(group_with(Communicator(), backend="nccl"), monkeypatch)
    assert not waits_for_device(group_with(Communicator(), backend="gloo"), monkeypatch)
    assert waits_for_device(in_an_island(Communicator()), monkeypatch)
    with_member = group_with(Communicator(), backend="gloo")
    with_member._member = SimpleNamespace(is_nccl=True)  # type: ignore[assignment]  # of a member group, this is read only
    assert waits_for_device(with_member, monkeypatch)


def test_a_cut_aborts_nccl_inside_an_island() -> None:
    """The way back would otherwise wait for a head that is gone."""
    communicator = Communicator()
    group = in_an_island(communicator)
    group.cut("a peer is lost")
    for thread in group._aborts:
        thread.join()
    assert communicator.aborts == 1


def test_an_exchange_of_the_script_is_refused_where_nothing_repeats_it() -> None:
    """Before anything is sent, so that all ranks get the error; where it is allowed, it is counted."""
    group = group_with(None, backend="gloo")
    with pytest.raises(UsageError, match=r"job.sum can be used inside `with step:` before step.apply, and in hooks"):
        group.script.begin("job.sum")
    group.script.is_open = True
    group.script.begin("job.sum")
    assert group.script.started == 1


def test_more_groups_of_owners_than_the_planner_may_ask_for_are_refused() -> None:
    pairs = [(first, second) for first in range(40) for second in range(40, 80)]
    allowed = pairs[:MOST_OWNER_GROUPS]
    every = tuple(range(80))
    assert owners_to_connect([*allowed, *allowed, every, (3,)], 80) == allowed
    with pytest.raises(UsageError, match=f"{MOST_OWNER_GROUPS + 1} groups of ranks, and at most {MOST_OWNER_GROUPS} "):
        owners_to_connect(pairs[: MOST_OWNER_GROUPS + 1], 80)


@pytest.mark.parametrize("seed", range(times(gate=30, every=600)))
def test_ranks_need_no_more_groups_than_the_plan_counts(seed: int) -> None:
    """Pieces of drawn layouts, with parameters of any size, as ranks find them."""
    rng = random.Random(seed)  # noqa: S311  # reproducible
    units = rng.randint(2, 6)
    sizes = {f"{unit}": rng.randint(1, 60) for unit in range(units)}
    layouts, holdings = [], []
    for _ in range(rng.randint(2, 3)):
        if rng.random() < 0.5:
            cuts = tuple(sorted(rng.sample(range(1, units), rng.randint(0, units - 1))))
            layouts.append(Layout(kind=LayoutKind.PIPELINE if cuts else LayoutKind.REPLICATED, cuts=cuts))
            edges = (0, *cuts, units)
            holdings += [
                {f"{unit}": TensorRange(f"{unit}", 0, sizes[f"{unit}"]) for unit in range(first, end)}
                for first, end in itertools.pairwise(edges)
            ]
            continue
        weights = tuple(rng.randint(1, 9) for _ in range(rng.randint(2, 4)))
        layouts.append(Layout(kind=LayoutKind.SHARDED, shards=len(weights), state_weights=weights))
        holdings += [
            {name: TensorRange(name, *layouts[-1].state_part(size, shard)) for name, size in sizes.items()}
            for shard in range(len(weights))
        ]
    pieces = pieces_of(sizes, holdings)
    assert len(owners_to_connect([piece.owners for piece in pieces], len(holdings))) <= owner_groups(layouts)


def test_a_sum_does_not_count_as_a_change_by_the_script() -> None:
    """Gloo's thread copies a GPU's sum into the buffer at any time; the guards against scripts count such changes."""
    flat = torch.ones(3)

    def add(tensors: list[torch.Tensor], _options: object) -> None:
        tensors[0].add_(1.0)

    version = flat._version
    group = group_with(SimpleNamespace(allreduce=add), backend="gloo")
    group.all_reduce(flat)
    assert flat.tolist() == [2.0] * 3
    assert flat._version == version
