"""Steps and memory of a sharded member of unequal devices: equal parts of the state next to parts by memory.

Three workers emulate devices of speeds 4, 2 and 1 and a link between them by waits, and memories as limits of the
planner. As in a job, each worker measures the model's units before the first plan. The
planner then divides the state equally, as ``fully_shard`` does, or by memory; samples follow speed in both, as far as
memory allows. Both divisions run in the same processes, one after the other, in several rounds. A step is measured
from its begin to the next one's. With ``--pipeline``, the best cut into stages runs as a third one, for its memory.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.plan import Layout, LayoutKind
from heterotrain_core.units import ends_inside
from heterotrain_planner.layout.costs import costs_of
from heterotrain_planner.layout.pass_time import gathered_bytes
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.schedule import passes, share_seconds
from heterotrain_planner.layout.sharded import sharded_template
from machine import machine
from paced_pipelines import Operator, Worker, Zygote, profiles, stages_of

SCRIPT = "distributed.paced_shard_scripts:train"
SPEEDS = {"d4": 4.0, "d2": 2.0, "d1": 1.0}
"""Emulated speeds."""
STAGE_SAMPLES = 2
"""Samples of a micro-batch of stages."""
STEPS = 3
"""Steps of a division that count, after the one in which it changes."""


class Line(NamedTuple):
    """What a worker has written of a step; see ``paced_shard_scripts.train``."""

    weights: list[int]
    began_s: float
    messages_s: float
    peak_bytes: int
    held_bytes: int


def lines_of(folder: Path, worker: str) -> list[Line]:
    """Return what a worker has written of its steps."""
    path = folder / f"steps-{worker}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Line(*json.loads(line)) for line in lines if line.endswith("\n")]


def problem_of(
    workers: dict[str, Worker], *, batch: int, room: float, memories: Sequence[float], link_bytes_per_s: float
) -> Problem:
    """Return the planner's question; the smallest memory is ``room`` times what an equal part and a sample need."""
    units = profiles(workers)
    kinds = tuple(DeviceKind(name=name, count=1, memory_bytes=0) for name in workers)
    problem = Problem(
        units=units, kinds=kinds, default_link=Link(bytes_per_s=link_bytes_per_s), batch_samples=batch,
        micro_batches=tuple(sorted({1, 2, 4, 8, batch // 2, batch})), may_cut=False, may_shard=True, reduces_late=True,
        ends_inside=ends_inside(units[0].name),
    )  # fmt: skip
    gathered = gathered_bytes(problem, len(kinds))
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in units)
    sample = sum(unit.activation_bytes for unit in units)
    least = state / len(kinds) + gathered + sample  # equal parts leave the smallest device room for one sample
    smallest = room * least
    kinds = tuple(
        replace(kind, memory_bytes=int(memory / min(memories) * smallest))
        for kind, memory in zip(kinds, memories, strict=True)
    )
    return replace(problem, kinds=kinds)


def divisions(problem: Problem) -> dict[str, Template]:
    """Return the planner's divisions with the shortest step, equal and by memory, of exactly these devices.

    Raises:
        SystemExit: one of them does not fit.
    """
    devices = [1] * len(problem.kinds)
    found = {}
    for name, equal in (("equal", True), ("by memory", False)):
        tried = [sharded_template(problem, devices, size, equal_shards=equal) for size in problem.micro_batches]
        fitting = [each for each in tried if each is not None]
        if not fitting:
            sys.exit(f"no {name} division fits")
        found[name] = min(fitting, key=lambda each: -(-problem.batch_samples // each.micro_batch_samples) * each.next_s)
    return found


class Way(NamedTuple):
    """A division of the model that runs.

    Attributes:
        layout: as plans name it.
        micro_batch_samples: of the member.
        step_s: predicted.
        planned_bytes: of each worker, in their order.
        parts: for people.
        samples: for people.
    """

    layout: Layout
    micro_batch_samples: int
    step_s: float
    planned_bytes: tuple[int, ...]
    parts: str
    samples: str


def a_sharded_way(member: Template, batch: int) -> Way:
    """Return a division of every unit."""
    shards = member.layout.shards
    return Way(
        layout=member.layout.planned, micro_batch_samples=member.micro_batch_samples,
        step_s=-(-batch // member.micro_batch_samples) * member.next_s,
        planned_bytes=tuple(shard.memory_bytes for shard in shards),
        parts=", ".join(f"{shard.state_ratio:.0%}" for shard in shards),
        samples=", ".join(str(shard.share_samples) for shard in shards),
    )  # fmt: skip


def a_pipeline(problem: Problem, micro: int) -> Way:
    """Return the fastest stages of the workers in their order, if memory were no limit."""
    kinds = tuple(replace(kind, memory_bytes=2**40) for kind in problem.kinds)
    roomy = replace(problem, kinds=kinds, micro_batches=(micro,), may_cut=True, may_shard=False)
    costs = costs_of(roomy, micro)
    devices = range(len(kinds))
    every = (
        stages_of(roomy, costs, devices, cuts)
        for cuts in itertools.combinations(range(1, len(problem.units)), len(kinds) - 1)
    )
    stages = min(every, key=lambda each: share_seconds(passes(each), problem.batch_samples // micro))
    return Way(
        layout=Layout(kind=LayoutKind.PIPELINE, cuts=tuple(stage.first_unit for stage in stages[1:])),
        micro_batch_samples=micro, step_s=share_seconds(passes(stages), problem.batch_samples // micro),
        planned_bytes=tuple(stage.memory_bytes for stage in stages),
        parts=", ".join(f"units {stage.first_unit}-{stage.last_unit}" for stage in stages), samples="all",
    )  # fmt: skip


def run_once(operator: Operator, workers: dict[str, Worker], way: Way) -> dict[str, list[Line]]:
    """Train some steps in one division; return the lines that count, by worker."""
    after_s, layout, micro = time.time(), way.layout, way.micro_batch_samples
    operator.plan_members([(list(workers.values()), layout, operator.batch_samples, micro)])
    found: dict[str, list[Line]] = {}

    def ran() -> bool:
        for name in workers:
            lines = lines_of(operator.folder, name)
            found[name] = [x for x in lines if x.weights == division and x.began_s > after_s][1:]
        return all(len(lines) > STEPS for lines in found.values())

    division = list(layout.state_weights or layout.cuts)
    operator.until(ran, f"{STEPS} steps in division {division}")
    return {name: lines[: STEPS + 1] for name, lines in found.items()}


def table(problem: Problem, found: dict[str, Way], measured: dict[str, list[dict[str, list[Line]]]]) -> None:
    """Print the figures."""
    megabytes = 1e6
    state = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    memory = ", ".join(f"{kind.name} {kind.memory_bytes / megabytes:.0f} MB" for kind in problem.kinds)
    print(f"{len(problem.units)} layers, {state / megabytes:.0f} MB of training state; planned memory: {memory}.\n")
    print("| state | parts | samples | passes | planned memory | held | peak | step predicted | measured | messages |")
    print("| --- | --- | --- | ---: | --- | --- | --- | ---: | ---: | ---: |")
    steps = {}
    for name, way in found.items():
        rounds = measured[name]
        first = problem.kinds[0].name
        times = [b.began_s - a.began_s for each in rounds for a, b in itertools.pairwise(each[first])]
        lines = {kind.name: [x for each in rounds for x in each[kind.name][:-1]] for kind in problem.kinds}
        steps[name] = statistics.median(times)
        waits = statistics.median(x.messages_s for each in lines.values() for x in each)

        def by_rank(values: Iterable[float], scale: float = megabytes) -> str:
            return ", ".join(f"{value / scale:.0f}" for value in values)

        print(
            f"| {name} | {way.parts} | {way.samples} | {-(-problem.batch_samples // way.micro_batch_samples)} "
            f"| {by_rank(way.planned_bytes)} MB "
            f"| {by_rank(max(x.held_bytes for x in each) for each in lines.values())} MB "
            f"| {by_rank(max(x.peak_bytes for x in each) for each in lines.values())} MB "
            f"| {way.step_s:.2f} s | {steps[name]:.2f} s ({min(times):.2f} to {max(times):.2f}) | {waits:.2f} s |"
        )
    one, other = found["equal"], found["by memory"]
    print(
        f"\nBy memory over equal: predicted {one.step_s / other.step_s:.2f} times as fast, "
        f"measured {steps['equal'] / steps['by memory']:.2f} times."
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--batch", type=int, default=28)
    parser.add_argument("--sample-s", type=float, default=0.01, help="of a layer's forward pass at speed 1")
    parser.add_argument("--room", type=float, default=1.01, help="memory over what equal parts and a sample need")
    parser.add_argument("--link-gbit", type=float, default=0.5, help="emulated, and told to the planner")
    parser.add_argument(
        "--memories", type=float, nargs=3, default=[4, 2, 1], help="in proportion, fastest device first"
    )
    parser.add_argument("--late", action="store_true", help="gather units only when they compute, for comparison")
    parser.add_argument("--pipeline", action="store_true", help="also as stages, with micro-batches of two samples")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    link_bytes_per_s = arguments.link_gbit * 1e9 / 8
    print(f"{machine()}\n", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="unequal-shards-"))
    config = TrainingConfig(epochs=1, base_batch_samples=arguments.batch, parallelism="Auto")
    zygote = Zygote()
    operator = Operator(zygote, folder, config, batch_samples=arguments.batch)
    try:
        workers = {
            name: operator.start(
                name, script=SCRIPT, width=arguments.width, units=arguments.units,
                sample_s=arguments.sample_s / speed, samples=10**6, link_bytes_per_s=link_bytes_per_s,
                ahead=not arguments.late,
            )
            for name, speed in SPEEDS.items()
        }  # fmt: skip
        operator.until_ready(*workers.values())
        problem = problem_of(
            workers, batch=arguments.batch, room=arguments.room, memories=arguments.memories,
            link_bytes_per_s=link_bytes_per_s,
        )  # fmt: skip
        found = {name: a_sharded_way(member, arguments.batch) for name, member in divisions(problem).items()}
        if arguments.pipeline:
            found["stages"] = a_pipeline(problem, STAGE_SAMPLES)
        measured: dict[str, list[dict[str, list[Line]]]] = {name: [] for name in found}
        for _ in range(arguments.rounds):
            for name, way in found.items():
                measured[name].append(run_once(operator, workers, way))
        table(problem, found, measured)
    finally:
        operator.close()
        zygote.close()
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
