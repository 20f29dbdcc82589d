"""Pipelines of real trainer processes on emulated devices: what ``pipeline_picture`` and ``pipeline_layouts`` share.

Workers run the trainer with gloo. They emulate devices of other speeds by waits in their blocks, because the processors
of one machine are alike. As in a job, each worker measures the model's units before the first plan.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from heterotrain_core.contract import metrics
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.costs import Costs, costs_of
from heterotrain_planner.layout.cut import cut, layout_of
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Stage
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from distributed.harness import Operator, Worker  # noqa: E402  # after the path is set
from distributed.test_pipeline_jobs import plan_members  # noqa: E402  # after the path is set
from support.zygote import Zygote  # noqa: E402  # after the path is set

__all__ = [
    "ROOT", "Operator", "StepOfStage", "Timed", "Worker", "Zygote", "plan_members", "planned", "problem_of", "profiles",
    "records", "stages_of",
]  # fmt: skip

SCRIPT = "distributed.paced_scripts:train"
LINK = Link(bytes_per_s=1.25e9)


class Timed(NamedTuple):
    """A pass of a stage, in seconds since the step's begin."""

    stage: int
    forward: bool
    start_s: float
    end_s: float


class StepOfStage(NamedTuple):
    """What one worker wrote about a committed step; times are those of the machine's clock in seconds.

    Attributes:
        number: of the step.
        first_unit, end_unit: the stage's units, the last one not included.
        began_s: when the worker began the step.
        passes: (whether it is a forward pass, begin, end) of each pass.
    """

    number: int
    first_unit: int
    end_unit: int
    began_s: float
    passes: list[tuple[bool, float, float]]


def records(folder: Path, worker: str) -> list[StepOfStage]:
    """Return the steps that a worker has written so far, in order."""
    path = folder / f"passes-{worker}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [StepOfStage(*json.loads(line)) for line in lines if line.endswith("\n")]


def profiles(workers: Mapping[str, Worker]) -> tuple[UnitProfile, ...]:
    """Return what the workers have measured of the units and export, with each worker as a kind of device."""
    seconds: dict[int, dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    names: dict[int, str] = {}
    for worker in workers.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            if sample.name == metrics.UNIT_BYTES:
                unit = int(sample.labels[metrics.LABEL_UNIT])
                sizes[unit][sample.labels[metrics.LABEL_WHAT]] = int(sample.value)
                names[unit] = sample.labels[metrics.LABEL_UNIT_NAME]
            elif sample.name == metrics.UNIT_SECONDS:
                points = seconds[int(sample.labels[metrics.LABEL_UNIT])][worker.name]
                both = points.setdefault(int(sample.labels[metrics.LABEL_SAMPLES]), {})
                both[sample.labels[metrics.LABEL_PHASE]] = sample.value
    return tuple(
        UnitProfile(
            name=names[unit], parameter_bytes=sizes[unit][metrics.WHAT_PARAMETERS],
            activation_bytes=sizes[unit][metrics.WHAT_ACTIVATIONS], boundary_bytes=sizes[unit][metrics.WHAT_BOUNDARY],
            seconds={
                kind: tuple(
                    UnitSeconds(
                        micro_batch_samples=size, forward_s=both[metrics.PHASE_FORWARD],
                        backward_s=both[metrics.PHASE_BACKWARD],
                    )
                    for size, both in sorted(points.items())
                )
                for kind, points in seconds[unit].items()
            },
        )
        for unit in sorted(names)
    )  # fmt: skip


def problem_of(units: tuple[UnitProfile, ...], names: Sequence[str], *, share: int, micro: int) -> Problem:
    """Return the planner's problem with one device of each name, and one size of micro-batch.

    Args:
        units: the profile, with each device as a kind.
        names: of the devices.
        share: samples of the only member.
        micro: samples of a micro-batch.
    """
    kinds = tuple(DeviceKind(name=name, count=1, memory_bytes=2**34) for name in names)
    return Problem(units=units, kinds=kinds, default_link=LINK, batch_samples=share, micro_batches=(micro,))


def planned(problem: Problem, costs: Costs | None = None) -> tuple[Stage, ...]:
    """Return the planner's stages on exactly these devices, with their predicted times.

    Raises:
        RuntimeError: there is no cut.
    """
    (micro,) = problem.micro_batches
    costs = costs or costs_of(problem, micro)
    found = cut(costs, [1] * len(problem.kinds), problem.batch_samples // micro)
    if found is None:
        raise RuntimeError("these devices have room for the model, and the planner found no cut")
    return layout_of(problem, costs, found.stages).stages


def stages_of(problem: Problem, costs: Costs, order: Sequence[int], cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages of any cut, with the times that the planner predicts for them.

    Args:
        problem: with as many units as edges can be; models beyond ``costs.MOST_CUTS`` units are grouped.
        costs: of the problem.
        order: indices of the kinds, by stage.
        cuts: the first unit of each stage but the first one.
    """
    edges = [0, *cuts, len(problem.units)]
    stages = [(kind, edges[stage], edges[stage + 1]) for stage, kind in enumerate(order)]
    return layout_of(problem, costs, stages).stages
