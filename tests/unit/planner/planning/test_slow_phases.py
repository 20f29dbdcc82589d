"""Members that are slow in runs of steps, as by a neighbour or a clock: steps are predicted as they are on average."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_planner.perf.counters import Observation
from heterotrain_planner.perf.merge import merge_old
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.shares import SharesDecision, SharesRequest, decide_shares
from support.exported_counters import SimulatedMembers
from support.repeat import times

LINE = ComputeTime(per_sample_s=0, fixed_s=0.01, backward_per_sample_s=0, backward_fixed_s=0.02, update_s=0.005)
SLOWER, NOISE = 1.25, 0.05
LASTS, EVERY = 30, 300
"""Steps of a phase on average, and between two of them: members are slow for one step in eleven."""


class PhasedMembers(SimulatedMembers):
    """Members of two states; each leaves its state after a random number of steps."""

    def _step(self, shares: tuple[int, ...]) -> None:  # type: ignore[override]  # a narrower sequence
        draws = np.random.default_rng([self.seed, self.steps_run]).random(len(self.truth))
        for rank, draw in enumerate(draws):
            slow = self.slow.get(rank, 1.0) > 1.0
            slow = draw >= 1 / LASTS if slow else draw < 1 / EVERY
            self.slow[rank] = SLOWER if slow else 1.0
        super()._step(shares)


def predicted_over_mean(seed: int, members: int, scrape_steps: int) -> float:
    """Return the predicted step over the mean of many drawn ones, after 1,200 steps and two changes of shares."""
    rng = np.random.default_rng(seed)
    paces = 0.001 * np.exp(rng.uniform(0, 1.2, members))
    truth = [replace(LINE, per_sample_s=pace / 3, backward_per_sample_s=pace * 2 / 3) for pace in paces.tolist()]
    job = PhasedMembers(truth=truth, variation=NOISE, seed=seed)
    seen: list[tuple[Observation, ...]] = [()] * members
    shares, prediction = (100,) * members, None
    for scrape in range(1, 1200 // scrape_steps + 1):
        job.run(shares, scrape_steps)
        for each in job.scrape():
            rank = int(each.member[1:-2])
            seen[rank] = merge_old([*seen[rank], each])
        last = scrape == 1200 // scrape_steps
        if scrape * scrape_steps in (100, 300) or last:
            evidence = tuple(MemberEvidence(member=f"w{rank}/0", observations=each) for rank, each in enumerate(seen))
            decision = decide_shares(
                SharesRequest(
                    total_samples=100 * members,
                    members=evidence,
                    current_shares=shares,
                    least_gain_ratio=1.0 if last else 0.01,  # what is predicted is the step at the shares in force
                    probe=False,
                )
            )
            assert isinstance(decision, SharesDecision)
            shares, prediction = decision.shares, decision.prediction
    assert prediction is not None
    own_W = np.array(
        [
            (c.per_sample_s + c.backward_per_sample_s) * n + c.fixed_s + c.backward_fixed_s + c.update_s
            for c, n in zip(truth, shares, strict=True)
        ]
    )
    slow_DW = np.where(rng.random((200_000, members)) < LASTS / (LASTS + EVERY), SLOWER, 1.0)
    noise_DW = 1 + NOISE * rng.standard_normal(slow_DW.shape)
    return prediction.step_s / float((own_W * slow_DW * noise_DW).max(axis=1).mean())


@pytest.mark.parametrize(("members", "scrape_steps"), [(3, 5), (6, 10), (12, 25)])
def test_steps_with_slow_phases_are_predicted(members: int, scrape_steps: int) -> None:
    """A phase fills whole scrapes. Taken for single long steps or for changes of speed, it would add up to 20 %."""
    ratios = [predicted_over_mean(seed, members, scrape_steps) for seed in range(times(gate=2, every=30))]
    off = np.abs(np.array(ratios) - 1)
    assert float(np.quantile(off, 0.7)) <= 0.05
    assert off.max() <= 0.2, "a phase that is under way counts as a new speed"
