"""The batch where members have rare long steps: against every candidate, judged by drawn steps.

Any member's long step delays all members, and a larger batch has fewer steps. The oracles draw steps or enumerate which
members have a long one; they use none of the formulas under test.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.goodput import BatchChoice, choose_batch
from heterotrain_planner.perf.expected_maximum import expected_maximum, expected_maximum_of_hiccups
from heterotrain_planner.planning.batch import BatchDecision, BatchRequest, decide_batch
from heterotrain_planner.planning.fitting import fit_members
from support.repeat import times
from unit.core.oracles import member_step_s
from unit.planner.planning.test_long_steps import PAUSES, told

NOISE = 0.03
DRAWS = 4000
ALONE = CommunicationTime()


def a_cluster(rng: np.random.Generator) -> tuple[tuple[SplitMember, ...], CommunicationTime]:
    """Return 2 to 16 members of three speeds, half of them in clusters that accumulate, and their exchange."""
    accumulates = rng.random() < 0.5
    members = []
    for slowness in rng.choice([0.002, 0.004, 0.008], int(rng.integers(2, 17))).tolist():
        fixed_s = float(rng.uniform(0, 0.1))
        members.append(
            SplitMember(
                compute=ComputeTime(
                    per_sample_s=slowness / 3,
                    fixed_s=fixed_s / 3,
                    backward_per_sample_s=2 * slowness / 3,
                    backward_fixed_s=2 * fixed_s / 3,
                ),
                micro_cap_samples=int(rng.integers(64, 512)) if accumulates else None,
            )
        )
    overlapped_s, last_s = float(rng.uniform(0, 0.3)), float(rng.uniform(0, 0.05))
    return tuple(members), CommunicationTime(overlapped_s=overlapped_s, last_bucket_s=last_s, gamma=0.15)


def drawn_step_s(
    members: tuple[SplitMember, ...], exchange: CommunicationTime, batch: int, hiccups: Hiccups, seed: int
) -> float:
    """Return the mean of drawn steps of the balanced shares; every member has its long steps in exactly their rate."""
    split = balance(batch, members, communication=exchange)
    assert isinstance(split, Split)
    rng = np.random.default_rng(seed)  # the same draws for every batch
    z = rng.standard_normal((DRAWS, len(members)))
    place = np.argsort(rng.random(z.shape), axis=0)
    long = place < round(DRAWS * hiccups.rate)
    mean_s = np.array([member_step_s(m, n, exchange) for m, n in zip(members, split.shares, strict=True)])
    own_s = np.array([member_step_s(m, n, ALONE) for m, n in zip(members, split.shares, strict=True)])
    times = mean_s + NOISE * own_s * z + (long - hiccups.rate) * (hiccups.ratio * own_s + hiccups.pause_s)
    return float(times.max(axis=1).mean())


def lost(seed: int, hiccups: Hiccups) -> float:
    """Return the goodput that the best candidate by drawn steps has over the best one by the choice, relative."""
    rng = np.random.default_rng(seed)
    members, exchange = a_cluster(rng)
    base = 32 * len(members)
    phi = base * math.exp(float(rng.uniform(math.log(0.5), math.log(30))))
    choice = choose_batch(
        members,
        communication=exchange,
        base_samples=base,
        least_samples=base,
        most_samples=32 * base,
        current_samples=None,
        noise_samples=phi,
        hiccups=hiccups,
    )
    assert isinstance(choice, BatchChoice)
    found = max(choice.candidates, key=lambda candidate: candidate.goodput_per_s)
    worth = {
        candidate.samples: candidate.samples
        / drawn_step_s(members, exchange, candidate.samples, hiccups, seed)
        / (phi + candidate.samples)
        for candidate in choice.candidates
    }
    return max(worth.values()) / worth[found.samples] - 1


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ratio", "pause_s", "mean", "worst"),
    [(2.0, 0.0, 0.002, 0.01), (0.0, 0.2, 0.002, 0.01), (0.0, 2.0, 0.002, 0.01)],
    ids=["twice the step", "a pause of 0.2 s", "a pause of 2 s"],
)
def test_little_is_lost_against_the_best_candidate_by_drawn_steps(
    ratio: float, pause_s: float, mean: float, worst: float
) -> None:
    """Without waits for long steps, pauses of 2 s cost 3 % on average."""
    rates = (0.003, 0.01, 0.03) * 6
    losses = [lost(seed, Hiccups(rate=rate, ratio=ratio, pause_s=pause_s)) for seed, rate in enumerate(rates)]
    assert float(np.mean(losses)) < mean
    assert max(losses) < worst


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_the_wait_for_long_steps_is_that_of_all_outcomes(seed: int) -> None:
    """Up to nine members, each with or without a long step: the mean over all combinations."""
    rng = np.random.default_rng(seed)
    members = int(rng.integers(1, 10))
    mean_BW = rng.uniform(0.1, 1.0, (3, members)) ** rng.uniform(0, 2)
    own_BW = mean_BW * rng.uniform(0.2, 1.0, mean_BW.shape)
    hiccups = Hiccups(
        rate=float(rng.uniform(0.001, 0.5)), ratio=float(rng.uniform(0, 3)), pause_s=float(rng.uniform(0, 3))
    )
    found_B = expected_maximum_of_hiccups(mean_BW, own_BW, hiccups)
    for mean_W, own_W, found in zip(mean_BW, own_BW, found_B.tolist(), strict=True):
        longer_W = hiccups.ratio * own_W + hiccups.pause_s
        true = 0.0
        for outcome in itertools.product((0, 1), repeat=members):
            chance = math.prod(hiccups.rate if long else 1 - hiccups.rate for long in outcome)
            true += chance * float((mean_W + (np.array(outcome) - hiccups.rate) * longer_W).max())
        assert found == pytest.approx(true, rel=1e-12)
        noisy = expected_maximum(mean_W.tolist(), (0.05 * own_W).tolist(), hiccups=hiccups, own_s=own_W.tolist())
        assert found <= noisy * (1 + 1e-4)


def test_the_batches_before_a_jump_are_ranked_with_their_waits() -> None:
    """By hand: 128 samples take 0.1 s of micro-batches, and in 1 % of its steps a member pauses for 74 s.

    Without the wait of 5 s, the ten best of the 32 batches before a jump would be smaller ones.
    """
    hiccups = Hiccups(rate=0.01, pause_s=74.0)
    mean_s = hiccups.rate * hiccups.pause_s
    compute = ComputeTime(
        per_sample_s=0.0, fixed_s=0.1, backward_per_sample_s=1e-9, backward_fixed_s=0.0, update_s=mean_s
    )
    choice = choose_batch(
        (SplitMember(compute=compute, micro_cap_samples=16),) * 8,
        communication=ALONE,
        base_samples=128,
        least_samples=128,
        most_samples=4096,
        current_samples=128,
        noise_samples=2000.0,
        hiccups=hiccups,
    )
    assert isinstance(choice, BatchChoice)
    some_s = hiccups.pause_s * (1 - (1 - hiccups.rate) ** 8)
    best = max(range(128, 4097), key=lambda batch: batch / (0.1 * -(-batch // 128) + some_s) / (2000.0 + batch))
    assert choice.samples == best


def test_learned_pauses_count_in_the_choice_of_a_batch() -> None:
    """From telemetry of two batches: by hand, a pause of any of eight equal members delays a step by its length."""
    members = told([([100] * 8, 400), ([200] * 8, 400)], PAUSES, np.random.default_rng(3))
    fits = fit_members(members)
    learned = fits.models()[0].hiccups
    assert learned.pause_s == pytest.approx(PAUSES.pause_s, rel=0.3)
    decision = decide_batch(
        BatchRequest(
            members=members,
            base_samples=800,
            least_samples=800,
            most_samples=3200,
            current_samples=1600,
            noise_samples=4000.0,
        ),
        fits=fits,
    )
    assert isinstance(decision, BatchDecision)
    assert decision.choice is not None
    step_s = next(each.step_s for each in decision.choice.candidates if each.samples == decision.samples)
    wait_s = learned.pause_s * (1 - (1 - learned.rate) ** 8 - learned.rate)
    assert wait_s > 0.05
    found_s = step_s - fits.exchange.overhead_s - decision.choice.split.step_s
    assert found_s == pytest.approx(wait_s, rel=0.1)
