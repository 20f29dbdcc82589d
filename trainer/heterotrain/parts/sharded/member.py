"""This rank's member, where its ranks divide the model and exchange data in every forward and backward pass.

Its connections live as long as nothing interrupts a pass. A rank that leaves a pass in the middle cuts them, so that
the others leave it as well, and the next formation connects the ranks again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from heterotrain_core.contract.plan import LayoutKind

from heterotrain.errors import UsageError
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.gloo.member_group import MemberGroup, backend_for
from heterotrain.parts.sharded.sharded import forget_pass


class OwnMember:
    """The member of this rank in a job whose members may be sharded.

    Attributes:
        ranks: its number of ranks.
    """

    def __init__(self, model: torch.nn.Module, group: MemberGroup, device: torch.device) -> None:
        """Describe a member that has no connections yet.

        Args:
            model: divided among its ranks.
            group: of its ranks.
            device: of this rank.
        """
        self.ranks = group.size()
        self._model: Any = model
        self._group = group
        self._device = device

    def form(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        """Take part in a new formation, connecting the member's ranks where they are not.

        Args:
            active_group: the formation.
            cap_samples: the largest micro-batch known to fit on this rank.

        Returns:
            The largest micro-batch known to fit on all ranks of the member.

        Raises:
            PeerLost: a rank was lost meanwhile.
            UsageError: the plan gives this rank another place than its worker has started it for.
        """
        roster, group = active_group.roster, active_group.group
        if group is None or not is_any_sharded(active_group):
            return cap_samples
        position = roster.positions[active_group.rank]
        mine = [rank for rank, other in enumerate(roster.positions) if other == position]
        shard = roster.ranks[active_group.rank].shard
        if roster.members[position].layout.state_weights:
            raise UsageError(
                "the plan divides the state in unequal parts, but this job's members are sharded workers, whose ranks "
                "hold equal parts: use parallelism Auto"
            )
        if (len(mine), shard) != (self.ranks, self._group.rank()):
            raise UsageError(
                f"the plan makes this rank shard {shard} of a member of {len(mine)} ranks, but its worker divides the "
                f"model among {self.ranks} ranks: a sharded member is one worker"
            )
        rows = group.gather_now([float(self._group.is_connected), float(cap_samples or math.inf)])
        if self.ranks > 1:
            backend = backend_for(self._device, ranks=self.ranks)
            again = any(not rows[rank][0] for rank in mine)
            group.attach(self._group, f"member {position}" if again else "", backend)
        cap = min(rows[rank][1] for rank in mine)
        return None if math.isinf(cap) else int(cap)

    def leave_pass(self, reason: str, *, keep_gradients: bool) -> None:
        """Leave a forward or backward pass, wherever this rank is in it; the member's other ranks leave it, too.

        Args:
            reason: for the log.
            keep_gradients: whether the gradients are complete, and the step may still be finished with them.
        """
        if self.ranks > 1:
            kept = [(parameter, parameter.grad) for parameter in self._model.parameters()] if keep_gradients else []
            self._group.cut(reason)
            forget_pass(self._model)
            for parameter, gradient in kept:
                parameter.grad = gradient

    def rest(self) -> None:
        """Give up what a pass without gradients keeps gathered."""
        if self.ranks > 1:
            forget_pass(self._model)


def is_any_sharded(active_group: ActiveGroup) -> bool:
    """Return whether some member of the formation is sharded; all ranks come to the same conclusion."""
    return any(member.layout.kind is LayoutKind.SHARDED for member in active_group.roster.members)
