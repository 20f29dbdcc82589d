"""What the vote waits for has a name for the hang report."""

from __future__ import annotations

import pytest
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.numerics.host_copy import HostCopy
from heterotrain.steps.vote import read_loss


class Late(HostCopy):
    """A loss on a device that is still busy."""

    def __init__(self, group: Group) -> None:
        self.group, self.seen = group, ""

    def __float__(self) -> float:
        self.seen = self.group.waiting.what if self.group.waiting else ""
        return 2.5


def test_waiting_for_the_loss_is_named() -> None:
    group = Group(rank=0, world_size=1, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    late = Late(group)
    assert read_loss(late, group) == pytest.approx(2.5)
    assert late.seen == "the loss, behind the forward pass on the accelerator"
    assert group.waiting is None
    assert read_loss(late, None) == pytest.approx(2.5)
    group.close()
