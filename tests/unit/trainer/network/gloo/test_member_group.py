"""When operations inside a member end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from heterotrain.errors import PeerLost
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.group import Group, SocketFilter


class Endless:
    """An operation that gloo has lost: it never ends, and its connections look intact."""

    def __init__(self) -> None:
        self.looks = 0

    def allreduce(self) -> Endless:
        return self

    def wait(self, _limit: timedelta) -> None:
        self.looks += 1
        assert self.looks < 5, "the wait does not end"
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def connected() -> tuple[MemberGroup, Endless]:
    member, work = MemberGroup(rank=0, world_size=2), Endless()
    member._group, member._cut = work, ""
    return member, work


def test_a_wait_ends_with_the_formation() -> None:
    """Whatever became of the news inside the member: the other ranks have left the step."""
    member, work = connected()
    formation: Any = Group(rank=0, world_size=3, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    formation.attach(member, "", "gloo")
    assert member.is_connected
    formation._cut = "a peer is lost"  # noted, but the member has not been told
    with pytest.raises(PeerLost, match="the formation is over"):
        member.collective("allreduce", (), {})
    assert work.looks == 2  # once before the news, once to let the operation end by itself


def test_a_member_outlives_a_formation_that_was_closed() -> None:
    member, _ = connected()
    formation: Any = Group(rank=0, world_size=3, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    formation.attach(member, "", "gloo")
    formation.close()
    formation._cut = "closed long ago"
    assert member.is_connected
