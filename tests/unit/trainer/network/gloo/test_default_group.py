"""torch's default group and the groups that live longer than it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from heterotrain.network.gloo import default_group
from heterotrain.network.gloo.member_group import MemberGroup
from torch._C._distributed_c10d import _resolve_process_group as find  # torch has no public way
from torch._C._distributed_c10d import _unregister_process_group as unregister


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemberGroup]:
    """Return a member's group that is the only one kept; other tests of the process may have left theirs."""
    monkeypatch.setattr(default_group, "_KEPT", [])
    group = MemberGroup(rank=0, world_size=1)
    unregister(group.group_name)
    default_group.outlive(group)
    yield group
    unregister(group.group_name)


def test_a_formation_without_a_default_group_is_closed(member: MemberGroup) -> None:
    """A formation can fail before its default group is made, when a member is lost while it connects."""
    default_group.withdraw()
    default_group.withdraw()
    assert find(member.group_name) is member


def test_the_members_group_outlives_the_default_group(member: MemberGroup) -> None:
    carrier: Any = member  # nothing is exchanged
    for _ in range(2):
        default_group.publish(carrier, rank=0, world_size=1)
        assert dist.is_initialized()
        default_group.withdraw()
        assert not dist.is_initialized()
        assert find(member.group_name) is member
