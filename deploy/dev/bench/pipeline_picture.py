"""Draw a real step of a pipeline beside the planner's prediction: what each stage computes, and when.

Three workers run the trainer with gloo. They emulate devices of speeds 4, 2 and 1 by waits in their blocks, because
the processors of one machine are alike. As in a job, each worker measures the model's units before the first plan. The
planner chooses the cut from these times and predicts the passes. Then the workers train, and note when each pass
begins and ends.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.units import UnitProfile
from heterotrain_planner.layout.result import Stage
from heterotrain_planner.layout.schedule import passes, share_seconds, timeline
from paced_pipelines import (
    ROOT,
    SCRIPT,
    Operator,
    Timed,
    Worker,
    Zygote,
    plan_members,
    planned,
    problem_of,
    profiles,
    records,
)

mpl.use("Agg")
from matplotlib import pyplot as plt  # after the backend is set

SPEEDS = {"fast": 4, "middle": 2, "slow": 1}
BLOCKS, SAMPLE_S = 7, 0.1
"""Blocks of the model, and seconds of a block's forward pass for one sample on the slow device: long, so that other
programs on this machine hardly count."""
BATCH, MICRO, STEPS = 16, 2, 4
FORWARD, BACKWARD = "#4c78a8", "#f58518"
PICTURE = ROOT / "docs" / "pictures" / "pipeline.png"


def main() -> None:
    """Run, draw, and print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        zygote = Zygote()
        config = TrainingConfig(epochs=1, parallelism="Pipeline", base_batch_samples=BATCH, peer_timeout_s=10.0)
        operator = Operator(zygote, Path(folder), config, batch_samples=BATCH)
        try:
            workers = {
                name: operator.start(
                    name, script=SCRIPT, blocks=BLOCKS, sample_s=SAMPLE_S / speed,
                    samples=BATCH * STEPS,
                )
                for name, speed in SPEEDS.items()
            }  # fmt: skip
            operator.until_ready(*workers.values())
            units = profiles(workers)
            stages = planned(problem_of(units, list(SPEEDS), share=BATCH, micro=MICRO))
            order = [workers[stage.kind] for stage in stages]
            plan_members(operator, [(order, tuple(stage.first_unit for stage in stages[1:]), BATCH, MICRO)])
            operator.finish(order)
            measured = median_step(order, Path(folder))
        finally:
            operator.close()
            zygote.close()
    draw(units, stages, measured)


def median_step(workers: Sequence[Worker], folder: Path) -> list[Timed]:
    """Return the passes of the step that took the median time."""
    steps: dict[int, list[Timed]] = defaultdict(list)
    for stage, worker in enumerate(workers):
        for step in records(folder, worker.name):
            steps[step.number] += [Timed(stage, *each) for each in step.passes]
    begun = [(min(each.start_s for each in found), found) for found in steps.values()]
    moved = [
        [Timed(each.stage, each.forward, each.start_s - start_s, each.end_s - start_s) for each in found]
        for start_s, found in begun
    ]
    return sorted(moved, key=duration_s)[len(moved) // 2]


def duration_s(step: Sequence[Timed]) -> float:
    """Return the seconds from the first pass to the end of the last one."""
    return max(each.end_s for each in step)


def draw(units: tuple[UnitProfile, ...], stages: Sequence[Stage], measured: list[Timed]) -> None:
    """Draw the measured step above the predicted one."""
    times, micro_batches = passes(stages), BATCH // MICRO
    predicted = [Timed(each.stage, each.forward, each.start_s, each.end_s) for each in timeline(times, micro_batches)]
    difference = duration_s(measured) / share_seconds(times, micro_batches) - 1
    figure, axes = plt.subplots(2, sharex=True, figsize=(10, 4.6), layout="constrained")
    last = len(units) - 1
    labels = [
        f"speed {SPEEDS[stage.kind]}: units {stage.first_unit} to {stage.last_unit} of 0 to {last}\n"
        f"({units[stage.first_unit].name} to {units[stage.last_unit].name})"
        for stage in stages
    ]
    for axis, what, step in zip(axes, ("measured", "predicted by the planner"), (measured, predicted), strict=True):
        end_s = duration_s(step)
        busy_s = [sum(each.end_s - each.start_s for each in step if each.stage == n) for n in range(len(stages))]
        for each in step:
            colour = FORWARD if each.forward else BACKWARD
            axis.barh(each.stage, each.end_s - each.start_s, left=each.start_s, color=colour, edgecolor="white", lw=0.5)
        axis.set_yticks(range(len(stages)), labels)
        axis.invert_yaxis()
        axis.grid(visible=False)
        computes = ", ".join(f"{each:.2f}" for each in busy_s)
        waits = ", ".join(f"{1 - each / end_s:.0%}" for each in busy_s)
        title = (
            f"{what}: {micro_batches} micro-batches in {end_s:.2f} s; stages compute for {computes} s, wait for {waits}"
        )
        axis.set_title(title, fontsize="small", loc="left")
        print(title)
    axes[1].set_xlabel("seconds (forward passes blue, backward passes orange, waiting white)")
    print(f"The measured step is {difference:+.1%} from the prediction.")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
