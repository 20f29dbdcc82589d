"""What the vote waits for has a name for the hang report."""

from __future__ import annotations

import pytest
from heterotrain.errors import UsageError
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.steps.columns import SAMPLES
from heterotrain.steps.vote import read_loss, refuse_other_samples


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


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ((16.0, 16.0, 16.5), "for step 4 rank 0 has 16, and rank 2 has 16 and the epoch's end"),
        ((16.0, 10.0), "rank 0 has 16, and rank 1 has 10"),
        ((16.5, 16.5), ""),
    ],
)
def test_ranks_that_have_read_other_numbers_of_samples_are_refused(samples: tuple[float, ...], said: str) -> None:
    found = SAMPLES.reduction([(own,) for own in samples])
    assert bool(found) == bool(said)
    if found:
        with pytest.raises(UsageError, match=said):
            refuse_other_samples(found, 4)
