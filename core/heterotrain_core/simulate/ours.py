"""Our policy: the operator's own decision, called with simulated telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_core.simulate.policy import Orders, View
from heterotrain_core.split.balance import evenly


@dataclass(slots=True)
class Ours:
    """Shares by ``planning.shares.decide_shares``, the same code as in the operator."""

    name: str = "ours"
    restarts: bool = False
    shares: tuple[int, ...] | None = None
    batch_samples: int = 0

    def decide(self, view: View) -> Orders:
        """Return what the operator would write into its plan."""
        batch = max(self.batch_samples or view.batch_samples, len(view.seats))
        current = None if view.changed or batch != self.batch_samples else self.shares
        decision = decide_shares(
            SharesRequest(
                total_samples=batch,
                members=tuple(
                    MemberEvidence(
                        member=seat.member,
                        pool=seat.pool,
                        observations=tuple(view.observations.get(seat.member, ())),
                        micro_cap_samples=seat.memory_samples,
                    )
                    for seat in view.seats
                ),
                current_shares=current,
                min_gain_ratio=view.min_gain_ratio,
            )
        )
        self.batch_samples = batch
        if not isinstance(decision, SharesDecision):
            self.shares = evenly(batch, len(view.seats))
            return Orders(batch_samples=batch, shares=self.shares, reason=decision.reason)
        self.shares = decision.shares
        return Orders(
            batch_samples=batch,
            shares=decision.shares,
            probe=decision.probe,
            probe_steps=decision.probe_steps,
            predicted_step_s=decision.prediction.step_s if decision.prediction else None,
            reason=decision.reason,
        )
