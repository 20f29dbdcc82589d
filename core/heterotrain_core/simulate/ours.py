"""Our policy: the operator's own decisions, called with simulated telemetry."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_core.contract.plan import CommunicationTime
from heterotrain_core.goodput import BatchChoice, choose_batch
from heterotrain_core.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from heterotrain_core.simulate.policy import Orders, View
from heterotrain_core.split.balance import Infeasible, evenly
from heterotrain_core.split.curve import SplitMember


@dataclass(slots=True)
class Ours:
    """Shares by ``planning.shares.decide_shares``, an adaptive batch by ``goodput.choose_batch``: the operator's code."""

    name: str = "ours"
    restarts: bool = False
    shares: tuple[int, ...] | None = None
    batch_samples: int = 0

    def decide(self, view: View) -> Orders:
        """Return what the operator would write into its plan."""
        batch = max(self.batch_samples or view.batch_samples, len(view.seats))
        decision = self._shares(batch, view)
        if view.adaptive and isinstance(decision, SharesDecision):
            chosen = _batch(decision, batch, view)
            if chosen != batch:
                batch = chosen
                decision = self._shares(batch, view)
        self.batch_samples = batch
        if isinstance(decision, Infeasible):
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

    def _shares(self, batch: int, view: View) -> SharesDecision | Infeasible:
        members = tuple(
            MemberEvidence(
                member=seat.member,
                pool=seat.pool,
                observations=tuple(view.observations.get(seat.member, ())),
                micro_cap_samples=seat.memory_samples,
            )
            for seat in view.seats
        )
        current = None if view.changed or batch != self.batch_samples else self.shares
        return decide_shares(
            SharesRequest(
                total_samples=batch, members=members, current_shares=current, min_gain_ratio=view.min_gain_ratio
            )
        )


def _batch(decision: SharesDecision, batch: int, view: View) -> int:
    """Return the batch of greatest goodput for the learned models, the current one while a model is missing."""
    members = [
        SplitMember(compute=compute, micro_cap_samples=seat.memory_samples)
        for compute, seat in zip(decision.compute, view.seats, strict=True)
        if compute is not None
    ]
    if len(members) < len(view.seats):
        return batch
    least = max(view.base_batch, len(view.seats))
    choice = choose_batch(
        members,
        communication=decision.communication or CommunicationTime(),
        base_samples=view.base_batch,
        least_samples=least,
        most_samples=max(view.most_batch, least),
        current_samples=batch,
        noise_samples=view.noise_samples,
        overhead_s=decision.exchange.overhead_s,
    )
    return choice.samples if isinstance(choice, BatchChoice) else batch
