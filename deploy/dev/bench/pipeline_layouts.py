"""Predicted and measured steps of pipelines that never ran before, and the planner's cuts next to even ones.

Each set of two or three workers emulates devices of random speeds. A random layout of them, its order, cut, micro-batch
and share, is predicted from the workers' own profiles before it runs. Then the planner's cut of the same share runs,
and the even cut with the best and the worst order of the workers. A step is measured from its begin to the next one's
on the first stage, so it includes the vote and the optimizer. Prints Markdown.

Emulated speeds are waits, so a few cores suffice. The same seed gives the same speeds and layouts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heterotrain_core.contract.config import TrainingConfig
from heterotrain_planner.layout.costs import Costs, costs_of
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Stage
from heterotrain_planner.layout.schedule import passes, share_seconds
from machine import machine
from paced_pipelines import (
    SCRIPT,
    Operator,
    StepOfStage,
    Worker,
    Zygote,
    plan_members,
    planned,
    problem_of,
    profiles,
    records,
    stages_of,
)

BLOCKS = 12
SAMPLE_S = 0.02
"""Seconds of a block's forward pass for one sample on a device of speed 1."""
LEAST_SPEED, MOST_SPEED = 1.0, 4.0
MICRO = (1, 2, 3, 4)
"""Sizes of a micro-batch; 3 is between two sizes that workers measure."""
MOST_MICRO_BATCHES = 8
STEPS = 3
"""Steps that count, after the one in which the layout changes."""
TARGET_ERROR, TARGET_PART = 0.05, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A random layout.

    Attributes:
        speeds: of the workers.
        order: indices of the workers, by stage.
        cuts: the first unit of each stage but the first one.
        micro: samples of a micro-batch.
        share: samples of a step, a multiple of ``micro``.
    """

    speeds: tuple[float, ...]
    order: tuple[int, ...]
    cuts: tuple[int, ...]
    micro: int
    share: int


def draw(rng: random.Random, units: int) -> Drawn:
    """Return a random layout of two or three workers for a model of so many units."""
    stages = rng.choice((2, 3))
    speeds = tuple(round(rng.uniform(LEAST_SPEED, MOST_SPEED), 1) for _ in range(stages))
    micro = rng.choice(MICRO)
    return Drawn(
        speeds=speeds, order=tuple(rng.sample(range(stages), stages)),
        cuts=tuple(sorted(rng.sample(range(1, units), stages - 1))), micro=micro,
        share=micro * rng.randint(stages + 1, MOST_MICRO_BATCHES),
    )  # fmt: skip


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the first units of the stages but the first one, with the same number of blocks; unit 0 is no block."""
    return tuple(1 + round(blocks * stage / stages) for stage in range(1, stages))


def balanced_s(problem: Problem, costs: Costs) -> float:
    """Return the step of equally long stages: the fill of the pipeline, and no other waiting.

    Each micro-batch takes ``1 / Σ 1/w`` in each stage, where ``w`` are the seconds of the whole model on each device.
    """
    whole = [float(costs.compute_E(kind)[-1]) for kind in range(len(problem.kinds))]
    stage_s = 1 / sum(1 / seconds for seconds in whole)
    micro_batches = problem.batch_samples // costs.micro_batch_samples
    return (micro_batches + len(whole) - 1) * stage_s


def step_s(problem: Problem, stages: Sequence[Stage]) -> float:
    """Return the predicted seconds of a step."""
    (micro,) = problem.micro_batches
    return share_seconds(passes(stages), problem.batch_samples // micro)


def least_s(problem: Problem, costs: Costs) -> float:
    """Return the shortest predicted step over all orders and cuts, by trying each."""
    units, devices = len(problem.units), range(len(problem.kinds))
    return min(
        step_s(problem, stages_of(problem, costs, order, cuts))
        for order in itertools.permutations(devices)
        for cuts in itertools.combinations(range(1, units), len(devices) - 1)
    )


def begins_of(lines: Sequence[Sequence[StepOfStage]], edges: Sequence[int], after_s: float) -> list[float]:
    """Return when the first stage began the steps of a layout, without the first one.

    Args:
        lines: what the worker of each stage has written.
        edges: the first unit of each stage, and the number of units at the end.
        after_s: when the plan with this layout was written.
    """
    numbers: set[int] | None = None
    for stage, steps in enumerate(lines):
        own = {
            step.number
            for step in steps
            if (step.first_unit, step.end_unit) == (edges[stage], edges[stage + 1]) and step.began_s > after_s
        }
        numbers = own if numbers is None else numbers & own
    begun = {step.number: step.began_s for step in lines[0]}
    return [begun[number] for number in sorted(numbers or ())][1:]


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that is not exceeded by this part of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Set:
    """The workers of one set of speeds, and what runs on them."""

    def __init__(self, operator: Operator, drawn: Drawn) -> None:
        """Start the workers, and wait until they have measured the units."""
        self.operator, self.drawn = operator, drawn
        self.workers: dict[str, Worker] = {
            f"d{index}": operator.start(
                f"d{index}", script=SCRIPT, blocks=BLOCKS, sample_s=SAMPLE_S / speed, samples=100_000
            )
            for index, speed in enumerate(drawn.speeds)
        }
        operator.until_ready(*self.workers.values())
        names = list(self.workers)
        self.problem = problem_of(profiles(self.workers), names, share=drawn.share, micro=drawn.micro)
        self.costs = costs_of(self.problem, drawn.micro)

    def layouts(self) -> Mapping[str, tuple[Stage, ...]]:
        """Return what runs: the random layout first, then the planner's and the even ones."""
        count = len(self.drawn.speeds)
        even = [
            stages_of(self.problem, self.costs, order, even_cuts(BLOCKS, count))
            for order in itertools.permutations(range(count))
        ]
        even.sort(key=lambda stages: step_s(self.problem, stages))
        return {
            "random": stages_of(self.problem, self.costs, self.drawn.order, self.drawn.cuts),
            "planner": planned(self.problem, self.costs),
            "even, best order": even[0],
            "even, worst order": even[-1],
        }

    def run(self, stages: Sequence[Stage]) -> float:
        """Train in a layout; return the median step in seconds."""
        order = [self.workers[stage.kind] for stage in stages]
        cuts = tuple(stage.first_unit for stage in stages[1:])
        edges = (0, *cuts, len(self.problem.units))
        written_s = max(
            (step.began_s for worker in order for step in records(self.operator.folder, worker.name)), default=0.0
        )
        plan_members(self.operator, [(order, cuts, self.drawn.share, self.drawn.micro)])
        begins: list[float] = []

        def ran() -> bool:
            lines = [records(self.operator.folder, worker.name) for worker in order]
            begins[:] = begins_of(lines, edges, written_s)
            return len(begins) > STEPS

        self.operator.until(ran, f"{STEPS} steps with cuts {cuts}")
        return statistics.median(b - a for a, b in itertools.pairwise(begins[: STEPS + 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One layout that ran; times in seconds of a step."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a ratio to the measured step."""
        return abs(self.predicted_s / self.measured_s - 1)


def measure(zygote: Zygote, drawn: Drawn) -> tuple[dict[str, Measured], float, float]:
    """Run one set; return the layouts by name, the step of equal stages, and the shortest predicted step of any cut."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            epochs=1000, parallelism="Pipeline", base_batch_samples=drawn.share, peer_timeout_s=20.0
        )
        operator = Operator(zygote, Path(folder), config, batch_samples=drawn.share)
        try:
            own = Set(operator, drawn)
            layouts = own.layouts()  # all are predicted before any runs
            predicted = {what: step_s(own.problem, stages) for what, stages in layouts.items()}
            found = {
                what: Measured(what=what, predicted_s=predicted[what], measured_s=own.run(stages))
                for what, stages in layouts.items()
            }
            return found, balanced_s(own.problem, own.costs), least_s(own.problem, own.costs)
        finally:
            operator.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=20, help="random layouts, each with a set of speeds of its own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.layouts < 1:
        sys.exit("--layouts has to be at least 1")
    rng = random.Random(arguments.seed)  # noqa: S311  # seeded chance
    print(machine())
    columns = (
        "speeds", "order, cut", "micro-batches", "predicted", "measured", "off by", "planner", "even, best",
        "even, worst", "of equal stages", "of the best cut", "load",
    )  # fmt: skip
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    randoms: list[float] = []
    every: list[float] = []
    parts: list[float] = []
    parts_of_best: list[float] = []
    gains: dict[str, list[float]] = {"even, best order": [], "even, worst order": []}
    zygote = Zygote()
    try:
        for _ in range(arguments.layouts):
            drawn = draw(rng, BLOCKS + 2)
            found, equal_s, best_s = measure(zygote, drawn)
            one, planner = found["random"], found["planner"]
            randoms.append(one.error)
            every += [each.error for each in found.values()]
            parts.append(equal_s / planner.measured_s)
            parts_of_best.append(best_s / planner.measured_s)
            for what, values in gains.items():
                values.append(found[what].measured_s / planner.measured_s)
            rates = [f"{drawn.share / found[what].measured_s:.2f}/s" for what in ("planner", *gains)]
            cells = (
                " ".join(map(str, drawn.speeds)), f"{''.join(map(str, drawn.order))}, {' '.join(map(str, drawn.cuts))}",
                f"{drawn.share // drawn.micro} of {drawn.micro}", f"{one.predicted_s:.2f} s", f"{one.measured_s:.2f} s",
                f"{one.error:.1%}", *rates, f"{parts[-1]:.3f}", f"{parts_of_best[-1]:.3f}",
                f"{os.getloadavg()[0]:.0f}",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        zygote.close()
    print(f"\n| what | median | p95 | largest |\n|{' --- |' * 4}")
    for what, errors in (("random layouts", randoms), ("all that ran", every)):
        figures = (statistics.median(errors), quantile(errors, 0.95), max(errors))
        print(f"| prediction off by, {what} ({len(errors)}) | {' | '.join(f'{each:.1%}' for each in figures)} |")
    print(f"\n| the planner's cut | median | smallest | largest |\n|{' --- |' * 4}")
    rows = (
        ("part of the rate of equal stages", parts), ("part of the rate of the best cut", parts_of_best),
        ("rate over that of the even cut, best order", gains["even, best order"]),
        ("rate over that of the even cut, worst order", gains["even, worst order"]),
    )  # fmt: skip
    for what, values in rows:
        print(f"| {what} | {statistics.median(values):.3f} | {min(values):.3f} | {max(values):.3f} |")
    print(f"\nTargets: median prediction off by at most {TARGET_ERROR:.0%}, planner's cut at least {TARGET_PART:.2f}.")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
