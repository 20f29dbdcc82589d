"""Models of a job's ranks, as learned from their steps: shares of any members follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from heterotrain_planner.perf.model import ExchangeModel, MemberModel
from heterotrain_planner.planning.fitting import assumed_model

from heterotrain_operator.cluster_state.telemetry import MemberId

NOT_MEASURED = ExchangeModel(communication=None, reason="nothing was measured yet")


class MemberKey(NamedTuple):
    """Identifies a member by its ranks, and by its pool with the way in which the model is divided among them."""

    ranks: tuple[MemberId, ...]
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpeeds:
    """The speeds of a job's ranks and of their exchange.

    Attributes:
        members: models of the members of the plan that they were learned for.
        former: models of all other ranks that were observed, those that have left included, each with its pool.
        exchange: between the members.
    """

    members: Mapping[MemberKey, MemberModel] = field(default_factory=dict)
    former: tuple[tuple[str, MemberModel], ...] = ()
    exchange: ExchangeModel = NOT_MEASURED

    def has_all(self, keys: Sequence[MemberKey]) -> bool:
        """Return whether each of these members was observed itself."""
        return all(key in self.members and self.members[key].steps > 0 for key in keys)

    def of(self, keys: Sequence[MemberKey]) -> tuple[MemberModel, ...]:
        """Return a model for each member: its own, or else one like those of its pool or of the middle of all.

        A time curve holds for shares of the members that it was learned with, so these models have lines only.
        """
        known = (*((key.pool, model) for key, model in self.members.items()), *self.former)
        return tuple(
            replace(self.members[key], curve=None) if key in self.members else assumed_model(key.pool, known)
            for key in keys
        )
