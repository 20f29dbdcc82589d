"""What the vote waits for has a name for the hang report."""

from __future__ import annotations

import pytest
from heterotrain.errors import UsageError
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.network.control import HEADER, SAMPLES, STEPS, VOTE
from heterotrain.network.group import Group
from heterotrain.network.peer_sockets import SocketFilter
from heterotrain.steps import vote
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


@pytest.mark.parametrize(
    ("samples", "steps", "votes", "said"),
    [
        ((16.0, 16.0, 16.5), (4, 4, 4), (1, 1, 1), "for step 4 rank 0 has 16, and rank 2 has 16 and the epoch's end"),
        ((16.0, 10.0), (4, 4), (1, 1), "rank 0 has 16, and rank 1 has 10"),
        ((16.5, 16.5), (4, 4), (1, 1), ""),
        ((16.0, 10.0), (4, 5), (1, 1), ""),
        ((16.0, 10.0), (4, 4), (1, 0), ""),
    ],
)
def test_ranks_that_have_read_other_numbers_of_samples_are_refused(
    samples: tuple[float, ...], steps: tuple[int, ...], votes: tuple[int, ...], said: str
) -> None:
    rows = [[0.0] * HEADER for _ in samples]
    for row, *values in zip(rows, votes, steps, samples, strict=True):
        row[VOTE], row[STEPS], row[SAMPLES] = values
    if not said:
        vote._check_same_samples(rows, 4)
        return
    with pytest.raises(UsageError, match=said):
        vote._check_same_samples(rows, 4)
