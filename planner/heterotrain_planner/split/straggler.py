"""Stragglers: members whose floor alone makes the others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterotrain_core.contract.plan import Binding, CommunicationTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember

_ALONE = CommunicationTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A member without which the others would be faster.

    Attributes:
        member: its index in the given sequence.
        gain_ratio: part of the step time saved without it (and the stragglers before it), e.g. 0.25.
        step_s: the step time then.
        reason: one sentence for users.
    """

    member: int
    gain_ratio: float
    step_s: float
    reason: str


def find_stragglers(
    total_samples: int,
    members: Sequence[SplitMember],
    *,
    communication: CommunicationTime = _ALONE,
    least_members: int = 1,
) -> tuple[Straggler, ...]:
    """Return the members without which the others would be faster, the greatest gain first.

    At its floor, such a member determines the step time, while the others could take its samples and still finish
    sooner. Communication is assumed unchanged: fewer members rarely make it slower, so the gain usually is a lower
    bound.

    Args:
        total_samples: the global batch.
        members: by rank, as for ``balance``.
        communication: as for ``balance``.
        least_members: members that remain at least.
    """
    staying = list(range(len(members)))
    found: list[Straggler] = []
    split = balance(total_samples, members, communication=communication)
    while isinstance(split, Split) and len(staying) > max(1, least_members):
        best: tuple[float, int, Split] | None = None
        for place, binding in enumerate(split.bindings):
            if binding is not Binding.FLOOR or split.shares[place] == 0:
                continue
            if split.member_s[place] < split.step_s:
                continue  # other members determine the step, and would get more samples without it
            rest = [members[i] for i in staying[:place] + staying[place + 1 :]]
            without = balance(total_samples, rest, communication=communication)
            if isinstance(without, Split) and without.step_s < (best[0] if best else split.step_s):
                best = (without.step_s, place, without)
        if best is None:
            break
        gain = 1 - best[0] / split.step_s
        index = staying.pop(best[1])
        found.append(
            Straggler(
                member=index,
                gain_ratio=gain,
                step_s=best[0],
                reason=f"it cannot go below its floor of {split.shares[best[1]]} samples; without it a step "
                f"takes {best[0]:.4g} s instead of {split.step_s:.4g} s ({gain:.1%} less)",
            )
        )
        split = best[2]
    return tuple(found)
