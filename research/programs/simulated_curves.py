"""Simulated: what straight lines lose where times are curves. Prints Markdown for research/README.md.

Without noise, and with one batch: lines are fitted again after each change of shares, to the published times at all
shares so far and at 15 % less and more of the present ones, or to the latter alone. Time curves are those of the
operator's fit, from the same times. LB-BSP's rule divides by measured speed. Figures are steps over the true optimum.
Usage: simulated_curves.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember
from heterotrain_core.split.proportion import evenly, in_proportion
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.planning.evidence import MemberEvidence, split_member, with_curves
from heterotrain_planner.planning.fitting import fit_members
from heterotrain_simulator.buckets import two_terms
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from simulated_comparison import MIXES, USUAL, scenario

CASES = (
    ("imagenet", "4 A100 + 4 V100 + 8 RTX 6000", (6400,)),
    ("deepspeech2", "2 A100 + 6 RTX 2080 Ti + 8 T4", (224, 320, 452, 640)),
    ("deepspeech2", "4 A100 + 4 V100 + 8 RTX 6000", (320, 640)),
)
ROUNDS = 12
SETTLED = 6
"""Rounds after which the figures count."""
VARIED = 0.15
STEPS = 40
"""Steps at each of the shares, for the operator's fit."""

Shares = list[int]


class Case:
    """One workload on one mix with one batch."""

    def __init__(self, workload: str, mix: str, batch: int) -> None:
        """Read the published times."""
        self.of = scenario(workload, MIXES[mix], adaptive=False, on=USUAL)
        self.truth, self.batch = GroundTruth(self.of), batch
        self.workers = [
            Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i)
            for g in self.of.groups
            for i in range(g.count)
        ]
        self.exchange = two_terms(self.truth.buckets, self.truth.transfer_s(len(self.workers)))
        best = self.truth.optimum(self.workers, batch, 0.0)
        self.best_s = best.step_s if best is not None else float("nan")

    def own_s(self, gpu: str, samples: int) -> float:
        """Return the published seconds of a share."""
        times = self.truth.times(gpu, samples)
        return times.forward_s + times.backward_s

    def over(self, shares: Shares) -> float:
        """Return how much longer than the optimum a step takes, relative."""
        return self.truth.planned_s(self.workers, shares, 0.0) / self.best_s - 1

    def line(self, gpu: str, sizes: Sequence[int]) -> SplitMember:
        """Return a line through published times, by relative least squares without negative coefficients."""
        points = [(size, self.own_s(gpu, size)) for size in sorted({max(1, size) for size in sizes})]
        weights = [seconds**-2 for _, seconds in points]
        x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / sum(weights)
        y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / sum(weights)
        spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
        joint = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
        slope = min(max(0.0, joint / spread) if spread else y / x, y / x)
        back, fixed = self.of.workload.backward_part, y - slope * x
        return SplitMember(
            compute=ComputeTime(
                per_sample_s=(1 - back) * slope,
                fixed_s=(1 - back) * fixed,
                backward_per_sample_s=back * slope,
                backward_fixed_s=back * fixed,
            ),
            micro_cap_samples=self.truth.memory_samples(gpu),
        )

    def by_lines(self, *, all_shares: bool) -> Callable[[list[Shares]], Shares]:
        """Return the rule that divides by lines through all shares so far, or through those near the present one."""

        def following(before: list[Shares]) -> Shares:
            members = []
            for i, worker in enumerate(self.workers):
                now = before[-1][i]
                near = [int(now * (1 - VARIED)), int(now * (1 + VARIED))]
                members.append(self.line(worker.gpu, [*near, *(each[i] for each in before)] if all_shares else near))
            found = balance(self.batch, members, communication=self.exchange)
            return list(found.shares) if isinstance(found, Split) else before[-1]

        return following

    def by_curves(self, before: list[Shares]) -> Shares:
        """Return the shares by the operator's lines and time curves, from the published times at all shares so far."""
        evidence = tuple(
            MemberEvidence(
                member=worker.name,
                pool=worker.pool,
                observations=self.observations(worker.gpu, [each[i] for each in before]),
                micro_cap_samples=self.truth.memory_samples(worker.gpu),
            )
            for i, worker in enumerate(self.workers)
        )
        models = fit_members(evidence).models(total_samples=self.batch)
        members = [split_member(m, x.compute) for m, x in zip(evidence, models, strict=True) if x.compute is not None]
        found = balance(self.batch, with_curves(self.batch, members, models), communication=self.exchange)
        return list(found.shares) if isinstance(found, Split) else before[-1]

    def observations(self, gpu: str, shares: Sequence[int]) -> tuple[Observation, ...]:
        """Return the published times of these shares, of 15 % less and more of the last one, and of it once more."""
        now = shares[-1]
        limit = self.truth.memory_samples(gpu)
        return tuple(
            Observation(
                member=gpu,
                share_samples=share,
                micro_batches=-(-share // limit),
                steps=STEPS,
                ended_s=float(at),
                compute=MeanVariance(mean=self.own_s(gpu, share), variance=0.0),
            )
            for at, share in enumerate([*shares, int(now * (1 - VARIED)), int(now * (1 + VARIED)), now], start=1)
            if share > 0
        )

    def by_speed(self, before: list[Shares]) -> Shares:
        """Return LB-BSP's shares."""
        speeds = [
            max(1, round(1e6 * share / self.own_s(worker.gpu, max(1, share))))
            for worker, share in zip(self.workers, before[-1], strict=True)
        ]
        return list(in_proportion(self.batch, tuple(speeds)))

    def settled(self, following: Callable[[list[Shares]], Shares]) -> str:
        """Return the range of steps over the optimum once the rule has settled, or goes round in circles."""
        seen = [list(evenly(self.batch, len(self.workers)))]
        for _ in range(ROUNDS):
            seen.append(following(seen))
        last = [self.over(shares) for shares in seen[SETTLED:]]
        low, high = f"{min(last):.1%}", f"{max(last):.1%}"
        return low if low == high else f"{low} to {high}"


def main() -> None:
    """Print one row for each case."""
    print("| workload, batch | GPUs | even | by measured speed | lines | lines near the shares | curves |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for workload, mix, batches in CASES:
        for batch in batches:
            case = Case(workload, mix, batch)
            even = f"{case.over(list(evenly(batch, len(case.workers)))):.1%}"
            rules = (case.by_speed, case.by_lines(all_shares=True), case.by_lines(all_shares=False), case.by_curves)
            cells = " | ".join(case.settled(rule) for rule in rules)
            print(f"| {workload}, {batch} | {mix} | {even} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
