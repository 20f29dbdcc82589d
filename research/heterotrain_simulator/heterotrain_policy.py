"""The heterotrain policy: the operator's own decisions on simulated telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.split.balance import Infeasible, evenly
from heterotrain_planner.planning.batch import BatchDecision, BatchRequest, decide_batch
from heterotrain_planner.planning.fitting import MemberFits, fit_members
from heterotrain_planner.planning.probe import PROBE_STEPS
from heterotrain_planner.planning.shares import MemberEvidence, SharesRequest, decide_shares

from heterotrain_simulator.policy import PolicyDecision, View


@dataclass(slots=True)
class HeterotrainPolicy:
    """Shares by ``planning.shares.decide_shares`` and an adaptive batch by ``planning.batch``, as in the operator."""

    name: str = "heterotrain"
    restarts: bool = False
    shares: tuple[int, ...] | None = None
    batch_samples: int = 0

    def decide(self, view: View) -> PolicyDecision:
        """Return the decision of the operator's plan."""
        members = tuple(
            MemberEvidence(
                member=slot.member,
                pool=slot.pool,
                observations=tuple(view.observations.get(slot.member, ())),
                micro_cap_samples=slot.memory_samples,
            )
            for slot in view.slots
        )
        before = max(self.batch_samples or view.batch_samples, len(view.slots))
        fits = fit_members(members)
        batch = _batch(fits, before, view) if view.adaptive else before
        current = None if view.changed or batch != self.batch_samples else self.shares
        decision = decide_shares(
            SharesRequest(
                total_samples=batch,
                members=members,
                current_shares=current,
                least_gain_ratio=view.min_gain_ratio,
                probe=view.may_probe,
            ),
            fits=fits,
        )
        self.batch_samples = batch
        if isinstance(decision, Infeasible):
            self.shares = evenly(batch, len(view.slots))
            return PolicyDecision(batch_samples=batch, shares=self.shares, reason=decision.reason)
        self.shares = decision.shares
        return PolicyDecision(
            batch_samples=batch,
            shares=decision.shares,
            probe=decision.probe,
            probe_steps=PROBE_STEPS if decision.probe else 0,
            predicted_step_s=decision.prediction.step_s if decision.prediction else None,
            reason=decision.reason,
        )


def _batch(fits: MemberFits, current: int, view: View) -> int:
    """Return the global batch of the operator's decision, the current one if none fits."""
    least = max(view.base_batch, len(fits.evidence))
    decision = decide_batch(
        BatchRequest(
            members=fits.evidence,
            base_samples=view.base_batch,
            least_samples=least,
            most_samples=max(view.most_batch, least),
            current_samples=current,
            noise_samples=view.noise_samples,
        ),
        fits=fits,
    )
    return decision.samples if isinstance(decision, BatchDecision) else current
