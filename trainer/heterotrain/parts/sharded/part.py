"""A rank's part of a model that ``fully_shard`` divides among the ranks of its worker.

All of them exchange data in every forward and backward pass, over connections that live as long as nothing interrupts a
pass. A rank that leaves a pass in the middle cuts them, so that the others leave it as well, and the next formation
connects the ranks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from heterotrain_core.contract.plan import LayoutKind

from heterotrain.errors import UsageError
from heterotrain.exchange.interface import Gradients
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.gloo.member_group import MemberGroup, backend_for
from heterotrain.parts.interface import SecondPhase
from heterotrain.parts.pieces.sums import PieceSums
from heterotrain.parts.sharded.sharded import forget_pass
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.whole.part import WholePart


class ShardedPart(WholePart):
    """A whole model to its script; worker by worker, its ranks hold it together. A worker of one rank holds it all."""

    has_phases = False

    def __init__(
        self,
        model: torch.nn.Module,
        sums: PieceSums,
        gradients: Gradients,
        *,
        group: MemberGroup,
        device: torch.device,
        layers: Sequence[torch.nn.Module] = (),
        draws: UnitDraws | None = None,
    ) -> None:
        """Describe a part that has no connections yet.

        Args:
            model: divided among the member's ranks.
            sums: of its gradients.
            gradients: those of the model before the first formation.
            group: of the member's ranks.
            device: of this rank.
            layers: as in ``WholePart``.
            draws: as in ``WholePart``.
        """
        super().__init__(model, gradients, layers=layers, draws=draws)
        self._sums, self._group, self._device = sums, group, device
        self._ranks = group.size()

    @property
    def gradients(self) -> Gradients:
        """Sums gradients as the current formation needs it."""
        return self._sums.current or self._gradients

    @property
    def second_phase(self) -> SecondPhase | None:
        """The second phase where a worker of several ranks takes part."""
        return self._sums.second_phase

    def form(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        """Take part in a new formation, connecting the member's ranks where they are not.

        Raises:
            PeerLost: a rank was lost meanwhile.
            UsageError: the plan gives this rank another place than its worker has started it for.
        """
        cap = self._connect(active_group, cap_samples)
        if active_group.group is not None:
            self._sums.form(active_group.group)
        return cap

    def _connect(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
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
        if (len(mine), shard) != (self._ranks, self._group.rank()):
            raise UsageError(
                f"the plan makes this rank shard {shard} of a member of {len(mine)} ranks, but its worker divides the "
                f"model among {self._ranks} ranks: a sharded member is one worker"
            )
        rows = group.gather_now([float(self._group.is_connected), float(cap_samples or math.inf)])
        if self._ranks > 1:
            backend = backend_for(self._device, ranks=self._ranks)
            again = any(not rows[rank][0] for rank in mine)
            group.attach(self._group, f"member {position}" if again else "", backend)
        cap = min(rows[rank][1] for rank in mine)
        return None if math.isinf(cap) else int(cap)

    def leave_pass(self, reason: str, *, keep_gradients: bool) -> None:
        """Leave a forward or backward pass, wherever this rank is in it; the member's other ranks leave it, too."""
        if self._ranks > 1:
            kept = [(parameter, parameter.grad) for parameter in self._model.parameters()] if keep_gradients else []
            self._group.cut(reason)
            forget_pass(self._model)
            for parameter, gradient in kept:
                parameter.grad = gradient

    def rest(self) -> None:
        """Give up what a pass without gradients keeps gathered."""
        if self._ranks > 1:
            forget_pass(self._model)

    def abandon(self) -> None:
        """Drop reductions that are in flight."""
        self._sums.abandon()


def is_any_sharded(active_group: ActiveGroup) -> bool:
    """Return whether some member of the formation is sharded; all ranks come to the same conclusion."""
    return any(member.layout.kind is LayoutKind.SHARDED for member in active_group.roster.members)
