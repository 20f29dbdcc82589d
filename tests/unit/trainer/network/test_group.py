"""A formation's connections, with a stand-in for NCCL, which needs a GPU for each rank."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.group import Group, SocketFilter


class Communicator:
    """Counts what is asked of it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.aborts = 0
        self._fails = fails

    def abort(self) -> None:
        """Count; a communicator that does not exist yet may refuse."""
        self.aborts += 1
        if self._fails:
            raise RuntimeError("no communicator")


def group_with(communicator: Any, *, backend: str) -> Group:
    """Return a group whose gradients use this communicator."""
    group = Group(rank=0, world_size=2, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    group._backend, group._gradients = backend, communicator
    return group


@pytest.mark.parametrize("fails", [False, True])
def test_a_cut_aborts_nccl_once(fails: bool) -> None:
    """NCCL's operations end in no other way; whatever abort does, the group is cut."""
    communicator = Communicator(fails=fails)
    group = group_with(communicator, backend="nccl")
    group.cut("a peer is lost")
    group.cut("again")
    assert communicator.aborts == 1
    with pytest.raises(PeerLost, match="a peer is lost"):
        group.check()


def test_a_cut_leaves_gloo_to_its_connections() -> None:
    """Gloo cannot be aborted; its sockets are shut down instead."""
    communicator = Communicator()
    group_with(communicator, backend="gloo").cut("a peer is lost")
    assert communicator.aborts == 0


def test_an_exchange_of_the_script_is_refused_where_nothing_repeats_it() -> None:
    """Before anything is sent, so that all ranks get the error; where it is allowed, it is counted."""
    group = group_with(None, backend="gloo")
    with pytest.raises(UsageError, match=r"job.sum can be used inside `with step:` before step.apply, and in hooks"):
        group.begin_script_exchange("job.sum")
    group.is_open = True
    group.begin_script_exchange("job.sum")
    assert group.script_exchanges == 1
